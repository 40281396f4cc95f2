"""Checks whether a checkpoint of unknown origin holds only weights, without loading it.

Safetensors hold no code. A torch file is a zip with a pickle in it. Zips that two readers could read differently (bytes
in front, a comment, duplicate names, unknown members) are refused. The pickle, a program for a small stack machine, is
followed by an interpreter without side effects. It tracks strings, tuples and names, so it knows what each instruction
would import and call, and refuses everything that is not known to be harmless or cannot be followed.
"""

from __future__ import annotations

import json
import pickletools
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

SB3_WEIGHTS = "policy.pth"
"""The member of a Stable-Baselines3 zip that holds the weights; other members hold pickled code."""

MAX_PICKLE_BYTES = 200 << 20
MAX_RATIO = 200
MAX_MEMBERS = 1_000_000
_MAX_HEADER_BYTES = 100 << 20
_END = struct.Struct("<4s4H2LH")
_TORCH_MEMBER = re.compile(
    r"[^/\\]+/(data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id)"
)
_SAFE_DTYPES = re.compile(r"(BOOL|BF16|C64|[IUF]\d+(_\w+)?)")


@dataclass(frozen=True)
class ScanReport:
    """Format of a file and whether it is safe to import."""

    safe: bool
    format: str
    """`safetensors`, `torch_zip`, `sb3_zip`, `pickle` or `unknown`."""
    globals: tuple[str, ...] = ()
    """Names that its pickle imports, if known."""
    reason: str = ""
    """Why it is not safe; completes a sentence that begins with the file name."""


_UNKNOWN_FORMAT = ScanReport(False, "unknown", reason="is not a known checkpoint format")


class _UnsafeZip(Exception):
    pass


def scan(path: Path) -> ScanReport:
    """Scan a file. Raises `OSError` when it cannot be read."""
    with open(path, "rb") as file:
        beginning = file.read(16)
        if not beginning:
            return ScanReport(False, "unknown", reason="is empty")
        file.seek(0)
        if beginning.startswith(b"PK\x03\x04"):
            return _scan_zip(file)
        if beginning[8:9] == b"{":
            return _scan_safetensors(file, path.stat().st_size)
        if beginning[:1] == b"\x80" or path.suffix in (".pkl", ".pickle", ".pt", ".pth"):
            return _scan_bare_pickle(file)
    return _UNKNOWN_FORMAT


def _scan_bare_pickle(file: IO[bytes]) -> ScanReport:
    """Explain what a bare pickle would do; it is never accepted."""
    data = file.read(MAX_PICKLE_BYTES)
    try:
        globals_ = check_pickle(data)
    except InvalidPickle:
        if data.startswith(b"\x80"):
            return ScanReport(False, "pickle", reason="is a bare pickle, damaged or truncated")
        return _UNKNOWN_FORMAT
    except UnsafePickle as error:
        return ScanReport(False, "pickle", reason=f"is a bare pickle: {error}")
    return ScanReport(False, "pickle", globals_, "is a bare pickle, which no loader of weights reads")


def _scan_safetensors(file: IO[bytes], size: int) -> ScanReport:
    def refuse(reason: str) -> ScanReport:
        return ScanReport(False, "safetensors", reason=reason)

    (length,) = struct.unpack("<Q", file.read(8))
    if length > min(_MAX_HEADER_BYTES, size - 8):
        return refuse(f"has a header of {length} bytes in a file of {size}")
    try:
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        spans = sorted((int(t["data_offsets"][0]), int(t["data_offsets"][1]), str(t["dtype"])) for t in header.values())
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return refuse("has a header that cannot be read")
    position = 0
    for begin, end, dtype in spans:
        if begin != position or end < begin or not _SAFE_DTYPES.fullmatch(dtype):
            return refuse("has tensors that overlap, leave gaps, or are of no known kind")
        position = end
    if 8 + length + position != size:
        return refuse(f"should have {8 + length + position} bytes and has {size}: truncated or added to")
    return ScanReport(True, "safetensors")


def _scan_zip(file: IO[bytes]) -> ScanReport:
    form = "torch_zip"
    try:
        with zipfile.ZipFile(file) as archive:
            names = _checked_members(file, archive)
            if SB3_WEIGHTS in names and "data" in names:
                form = "sb3_zip"
                inner = BytesIO(_read_member(archive, SB3_WEIGHTS))
                with zipfile.ZipFile(inner) as weights:
                    return ScanReport(True, form, _scan_torch(weights, _checked_members(inner, weights)))
            return ScanReport(True, form, _scan_torch(archive, names))
    except _UnsafeZip as error:
        return ScanReport(False, form, reason=str(error))
    except UnsafePickle as error:
        return ScanReport(False, form, reason=f"holds a pickle that cannot be trusted: {error}")
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError, ValueError) as e:
        return ScanReport(False, form, reason=f"is a damaged or unusual zip ({e})")


def _checked_members(file: IO[bytes], archive: zipfile.ZipFile) -> Sequence[str]:
    """Return the member names of a zip that all readers read in the same way."""
    members = archive.infolist()
    names = [member.filename for member in members]
    if not members or len(members) > MAX_MEMBERS:
        raise _UnsafeZip(f"is a zip with {len(members)} members")
    # A comment, or bytes behind the last record, could hold a second directory that another reader uses.
    file.seek(-_END.size, 2)
    end = _END.unpack(file.read(_END.size))
    if end[0] != b"PK\x05\x06" or end[-1] != 0 or archive.comment:
        raise _UnsafeZip("is a zip with something behind its end")
    if min(member.header_offset for member in members) != 0:
        raise _UnsafeZip("is a zip with something in front of it")
    if len(set(names)) != len(names) or len({name.lower() for name in names}) != len(names):
        raise _UnsafeZip("is a zip in which two members have one name")
    for member in members:
        name = member.filename
        if name.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", name) or "\0" in member.orig_filename:
            raise _UnsafeZip(f"is a zip with a member that leaves its directory ({name!r})")
        if member.flag_bits & 0x1:
            raise _UnsafeZip(f"is a zip with an encrypted member ({name!r})")
        if member.file_size > MAX_RATIO * max(member.compress_size, 1):
            raise _UnsafeZip(f"is a zip that would swell more than {MAX_RATIO} times ({name!r})")
    return names


def _scan_torch(archive: zipfile.ZipFile, names: Sequence[str]) -> tuple[str, ...]:
    unknown = [name for name in names if not _TORCH_MEMBER.fullmatch(name)]
    if unknown:
        raise _UnsafeZip(f"is a zip with a member that torch does not write ({unknown[0]!r})")
    roots = {name.partition("/")[0] for name in names}
    root = roots.pop()
    if roots or f"{root}/data.pkl" not in names:
        raise _UnsafeZip("is a zip, but not one written by torch")
    globals_ = check_pickle(_read_member(archive, f"{root}/data.pkl"))
    # Reads every member completely: sizes, names and checksums must be correct.
    damaged = archive.testzip()
    if damaged is not None:
        raise _UnsafeZip(f"is damaged: the checksum of {damaged!r} is wrong")
    return globals_


def _read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > MAX_PICKLE_BYTES and not name.endswith(".pth"):
        raise _UnsafeZip(f"holds a pickle of more than {MAX_PICKLE_BYTES >> 20} MB")
    with archive.open(name) as member:
        return member.read()


_DTYPES = (
    "float16 float32 float64 bfloat16 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex64 complex128 "
    "half float double short int long"
).split()
_STORAGES = (
    "Float Double Half BFloat16 Byte Char Short Int Long Bool ComplexFloat ComplexDouble QInt8 QInt32 QUInt8"
).split()
_VALUES = frozenset(
    [("torch", name) for name in _DTYPES]
    + [("torch", f"{name}Storage") for name in _STORAGES]
    + [("torch.storage", "UntypedStorage"), ("numpy", "ndarray")]
)
"""May be imported, but not called."""
_TENSORS = frozenset([("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_parameter")])
_ARRAYS = frozenset(
    [
        (module, name)
        for module in ("numpy._core.multiarray", "numpy.core.multiarray")
        for name in ("_reconstruct", "scalar")
    ]
)
_ORDERED_DICT, _ENCODE, _DTYPE = ("collections", "OrderedDict"), ("_codecs", "encode"), ("numpy", "dtype")
_SETS = (("__builtin__", "set"), ("builtins", "set"))
_PLAIN_DTYPE = re.compile(r"[<>|=]?[?biufc]\d*")
_CALLABLE = _TENSORS | _ARRAYS | {_ORDERED_DICT, _ENCODE, _DTYPE, *_SETS, ("torch", "Size"), ("torch", "device")}
_MAX_MEMO = 1 << 24
_PARSE_ERRORS = (
    ValueError,
    IndexError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    EOFError,
    struct.error,
    MemoryError,
)


class UnsafePickle(Exception):
    """A pickle that may have side effects, or cannot be followed."""


class InvalidPickle(UnsafePickle):
    """Bytes that are not a pickle, or a truncated or damaged one."""


class _Global(NamedTuple):
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class _CallResult(NamedTuple):
    """The result of a call."""

    function: tuple[str, str]


class _Tuple(NamedTuple):
    items: tuple[Any, ...]


class _Sentinel:
    """A marker object."""


_MARK, _OTHER, _NONE, _DICT, _LIST, _SET = (_Sentinel() for _ in range(6))


def check_pickle(data: bytes) -> tuple[str, ...]:
    """Return the names that the one pickle in `data` imports, sorted. Raises `UnsafePickle` if any is not harmless."""
    interpreter = _PickleInterpreter()
    end = 0
    try:
        for opcode, argument, position in pickletools.genops(data):
            interpreter.step(opcode.name, argument)
            end = (position or 0) + 1
    except UnsafePickle:
        raise
    except _PARSE_ERRORS as error:
        raise InvalidPickle(f"it is not a valid pickle ({type(error).__name__}: {error})"[:300]) from None
    if end != len(data):
        raise UnsafePickle(f"it has {len(data) - end} bytes after its end")
    return tuple(sorted(interpreter.imported))


@dataclass
class _PickleInterpreter:
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    imported: set[str] = field(default_factory=set)

    def step(self, name: str, argument: Any) -> None:
        if name in _CONSTANTS:
            self.stack.append(argument if isinstance(argument, str | int) else _OTHER)
        elif name in _LITERALS:
            self.stack.append(_LITERALS[name])
        elif name in _OPERATIONS:
            _OPERATIONS[name](self, argument)
        elif name not in ("PROTO", "FRAME"):
            raise UnsafePickle(f"it uses {name}, which weights do not need")

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise UnsafePickle("it uses a mark as a value")
        return value

    def pop_to_mark(self) -> list[Any]:
        items: list[Any] = []
        while (value := self.stack.pop()) is not _MARK:
            items.append(value)
        return items[::-1]

    def pop_many(self, count: int | None) -> list[Any]:
        """Pop values, down to the mark when `count` is None."""
        return self.pop_to_mark() if count is None else [self.pop() for _ in range(count)][::-1]

    def import_global(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise UnsafePickle("it computes what it imports")
        imported = _Global(module, name)
        if (module, name) not in _VALUES and (module, name) not in _CALLABLE:
            raise UnsafePickle(f"it would import {imported}")
        self.imported.add(str(imported))
        self.stack.append(imported)

    def stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        self.import_global(module, name)

    def reduce(self) -> None:
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, _Global) or (function.module, function.name) not in _CALLABLE:
            what = function if isinstance(function, _Global) else "the result of another call"
            raise UnsafePickle(f"it would call {what}")
        if not isinstance(arguments, _Tuple):
            raise UnsafePickle(f"it computes the arguments of {function}")
        # Looking up a codec imports its module.
        if function == _ENCODE and arguments.items[1:] != ("latin1",):
            raise UnsafePickle(f"it would call {function} with another codec than latin1")
        # Arrays of objects hold pointers, which must never be read from a file.
        kind = arguments.items[0] if arguments.items else None
        if function == _DTYPE and not (isinstance(kind, str) and _PLAIN_DTYPE.fullmatch(kind)):
            raise UnsafePickle("it has arrays of something other than numbers")
        self.stack.append(_CallResult((function.module, function.name)))

    def build(self) -> None:
        state, target = self.pop(), self.stack[-1]
        function = target.function if isinstance(target, _CallResult) else None
        if function == _ORDERED_DICT:
            # A pair as state would set attributes; the state of an ordered dict is a plain dict.
            is_safe = state is _DICT
        elif function == _DTYPE:
            # Version, byte order, no parts, names or fields, size, alignment, and no flag that makes it pointers.
            items = state.items if isinstance(state, _Tuple) else ()
            is_safe = len(items) == 8 and all(item is _NONE for item in items[2:5]) and items[7] == 0
        else:
            is_safe = function in _ARRAYS and isinstance(state, _Tuple)
        if not is_safe:
            raise UnsafePickle("it would set the internal state of an object")

    def fill(self, count: int | None, kind: str) -> None:
        """Add popped values to the container on top of the stack."""
        self.pop_many(count)
        target = self.stack[-1]
        is_dict = target is _DICT or (isinstance(target, _CallResult) and target.function == _ORDERED_DICT)
        if not {"dict": is_dict, "list": target is _LIST, "set": target is _SET}[kind]:
            raise UnsafePickle(f"it would use another object as a {kind}")

    def memoize(self, key: Any) -> None:
        if self.stack[-1] is _MARK:
            raise UnsafePickle("it uses a mark as a value")
        # The real unpickler allocates a table up to this index.
        if not 0 <= int(key) < _MAX_MEMO:
            raise UnsafePickle(f"it uses the memo index {key}, which would fill the memory")
        self.memo[int(key)] = self.stack[-1]

    def replace_to_mark(self, value: Any) -> None:
        self.pop_to_mark()
        self.stack.append(value)

    def load_persistent(self) -> None:
        if not isinstance(self.pop(), _Tuple):
            raise UnsafePickle("it has an external reference that weights do not have")
        self.stack.append(_OTHER)

    def stop(self) -> None:
        self.pop()
        if self.stack:
            raise UnsafePickle("it leaves values on its stack")


_CONSTANTS = frozenset(
    (
        "NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING "
        "SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8"
    ).split()
)
_LITERALS: dict[str, Any] = {
    "EMPTY_DICT": _DICT,
    "EMPTY_LIST": _LIST,
    "EMPTY_SET": _SET,
    "EMPTY_TUPLE": _Tuple(()),
    "MARK": _MARK,
    "NONE": _NONE,
}
_OPERATIONS: dict[str, Callable[[_PickleInterpreter, Any], Any]] = {
    # pickletools joins module and name with a blank; no allowed name contains one.
    "GLOBAL": lambda m, argument: m.import_global(*argument.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.stack_global(),
    "REDUCE": lambda m, _: m.reduce(),
    "BUILD": lambda m, _: m.build(),
    "BINPERSID": lambda m, _: m.load_persistent(),
    "STOP": lambda m, _: m.stop(),
    "TUPLE": lambda m, _: m.stack.append(_Tuple(tuple(m.pop_many(None)))),
    "TUPLE1": lambda m, _: m.stack.append(_Tuple(tuple(m.pop_many(1)))),
    "TUPLE2": lambda m, _: m.stack.append(_Tuple(tuple(m.pop_many(2)))),
    "TUPLE3": lambda m, _: m.stack.append(_Tuple(tuple(m.pop_many(3)))),
    "LIST": lambda m, _: m.replace_to_mark(_LIST),
    "DICT": lambda m, _: m.replace_to_mark(_DICT),
    "FROZENSET": lambda m, _: m.replace_to_mark(_OTHER),
    "SETITEM": lambda m, _: m.fill(2, "dict"),
    "SETITEMS": lambda m, _: m.fill(None, "dict"),
    "APPEND": lambda m, _: m.fill(1, "list"),
    "APPENDS": lambda m, _: m.fill(None, "list"),
    "ADDITEMS": lambda m, _: m.fill(None, "set"),
    "POP": lambda m, _: m.pop(),
    "POP_MARK": lambda m, _: m.pop_to_mark(),
    "DUP": lambda m, _: m.stack.extend([m.pop()] * 2),
    "PUT": lambda m, key: m.memoize(key),
    "BINPUT": lambda m, key: m.memoize(key),
    "LONG_BINPUT": lambda m, key: m.memoize(key),
    "MEMOIZE": lambda m, _: m.memoize(len(m.memo)),
    "GET": lambda m, key: m.stack.append(m.memo[int(key)]),
    "BINGET": lambda m, key: m.stack.append(m.memo[int(key)]),
    "LONG_BINGET": lambda m, key: m.stack.append(m.memo[int(key)]),
}
