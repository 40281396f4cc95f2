"""What a pickle would do if it were loaded, found out without loading it.

A pickle is a program for a small stack machine. This is that machine with every deed left out: it keeps track of
strings, tuples and names, so that it knows what each instruction would import and call. What is not on the list of
harmless things, and what cannot be followed, is refused: a scanner that guesses is a scanner that can be fooled.
"""

from __future__ import annotations

import pickletools
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["NoPickle", "PickleRefused", "pickle_globals"]

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
"""May be named; calling them is refused."""
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
_BROKEN = (
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


class PickleRefused(Exception):
    """A pickle that may do something, or cannot be followed."""


class NoPickle(PickleRefused):
    """Bytes that are no pickle, or one that was cut short or damaged."""


class _Global(NamedTuple):
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class _Made(NamedTuple):
    """What a call of this would have returned."""

    by: tuple[str, str]


class _Tuple(NamedTuple):
    items: tuple[Any, ...]


class _Sentinel:
    """One of its kind."""


_MARK, _OTHER, _NONE, _DICT, _LIST, _SET = (_Sentinel() for _ in range(6))


def pickle_globals(data: bytes) -> tuple[str, ...]:
    """Everything the one pickle in `data` would import, sorted; `PickleRefused` if any of it is not harmless."""
    machine = _Machine()
    end = 0
    try:
        for opcode, argument, position in pickletools.genops(data):
            machine.step(opcode.name, argument)
            end = (position or 0) + 1
    except PickleRefused:
        raise
    except _BROKEN as error:
        raise NoPickle(f"it is no pickle that can be followed ({type(error).__name__}: {error})"[:300]) from None
    if end != len(data):
        raise PickleRefused(f"{len(data) - end} bytes lie behind its end")
    return tuple(sorted(machine.named))


@dataclass
class _Machine:
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)

    def step(self, name: str, argument: Any) -> None:
        if name in _CONSTANTS:
            self.stack.append(argument if isinstance(argument, str | int) else _OTHER)
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name])
        elif name in _DEEDS:
            _DEEDS[name](self, argument)
        elif name not in ("PROTO", "FRAME"):
            raise PickleRefused(f"it uses {name}, which weights have no need of")

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise PickleRefused("it takes a mark for a value")
        return value

    def pop_to_mark(self) -> list[Any]:
        taken: list[Any] = []
        while (value := self.stack.pop()) is not _MARK:
            taken.append(value)
        return taken[::-1]

    def name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleRefused("it works out at run time what it imports")
        named = _Global(module, name)
        if (module, name) not in _VALUES and (module, name) not in _CALLABLE:
            raise PickleRefused(f"it would import {named}")
        self.named.add(str(named))
        self.stack.append(named)

    def reduce(self) -> None:
        arguments, called = self.pop(), self.pop()
        if not isinstance(called, _Global) or (called.module, called.name) not in _CALLABLE:
            raise PickleRefused(f"it would call {called if isinstance(called, _Global) else 'something it made'}")
        if not isinstance(arguments, _Tuple):
            raise PickleRefused(f"it works out at run time what it gives to {called}")
        self._check_arguments(called, arguments.items)
        self.stack.append(_Made((called.module, called.name)))

    def _check_arguments(self, called: _Global, given: tuple[Any, ...]) -> None:
        # Any codec could be asked for otherwise, and looking one up imports its module.
        if called == _ENCODE and given[1:] != ("latin1",):
            raise PickleRefused(f"it would call {called} with another codec than latin1")
        # Arrays of objects hold pointers, which bytes of a file must never become.
        kind = given[0] if given else None
        if called == _DTYPE and not (isinstance(kind, str) and _PLAIN_DTYPE.fullmatch(kind)):
            raise PickleRefused("it has arrays of something else than numbers")

    def build(self) -> None:
        state, target = self.pop(), self.stack[-1]
        by = target.by if isinstance(target, _Made) else None
        if by == _ORDERED_DICT:
            # A pair as state would set attributes one by one; an ordered dict's own is a plain dict.
            fine = state is _DICT
        elif by == _DTYPE:
            # Version, byte order, no parts, no names, no fields, size, alignment, and no flag that makes it pointers.
            items = state.items if isinstance(state, _Tuple) else ()
            fine = len(items) == 8 and all(item is _NONE for item in items[2:5]) and items[7] == 0
        else:
            fine = by in _ARRAYS and isinstance(state, _Tuple)
        if not fine:
            raise PickleRefused("it would set the inner state of an object")

    def fill(self, kind: str) -> None:
        target = self.stack[-1]
        dictionary = target is _DICT or (isinstance(target, _Made) and target.by == _ORDERED_DICT)
        if not {"dict": dictionary, "list": target is _LIST, "set": target is _SET}[kind]:
            raise PickleRefused(f"it would fill something as if it were a {kind}")

    def put(self, key: Any) -> None:
        if self.stack[-1] is _MARK:
            raise PickleRefused("it takes a mark for a value")
        # The real machine makes room for all numbers up to this one.
        if not 0 <= int(key) < _MAX_MEMO:
            raise PickleRefused(f"it remembers something under the number {key}, which would fill the memory")
        self.memo[int(key)] = self.stack[-1]

    def tuple_of(self, count: int) -> None:
        items = [self.pop() for _ in range(count)][::-1]
        self.stack.append(_Tuple(tuple(items)))

    def drop(self, count: int | None = None) -> None:
        if count is None:
            self.pop_to_mark()
        for _ in range(count or 0):
            self.pop()

    def double(self) -> None:
        value = self.pop()
        self.stack += [value, value]


def _global(machine: _Machine, argument: str) -> None:
    # pickletools joins the two lines with a blank, so a name with blanks in it cannot be told apart; none of ours has.
    module, _, name = argument.partition(" ")
    machine.name(module, name)


def _stack_global(machine: _Machine, _: Any) -> None:
    name, module = machine.pop(), machine.pop()
    machine.name(module, name)


def _replace(machine: _Machine, value: Any) -> None:
    machine.pop_to_mark()
    machine.stack.append(value)


def _filled(machine: _Machine, count: int | None, kind: str) -> None:
    machine.drop(count)
    machine.fill(kind)


def _persistent(machine: _Machine, _: Any) -> None:
    if not isinstance(machine.pop(), _Tuple):
        raise PickleRefused("it refers to something outside in a way that weights do not")
    machine.stack.append(_OTHER)


def _stop(machine: _Machine, _: Any) -> None:
    machine.pop()
    if machine.stack:
        raise PickleRefused("it leaves something behind on its stack")


_CONSTANTS = frozenset(
    (
        "NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING "
        "SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8"
    ).split()
)
_EMPTY: dict[str, Any] = {
    "EMPTY_DICT": _DICT, "EMPTY_LIST": _LIST, "EMPTY_SET": _SET, "EMPTY_TUPLE": _Tuple(()), "MARK": _MARK,
    "NONE": _NONE,
}  # fmt: skip
_DEEDS: dict[str, Callable[[_Machine, Any], None]] = {
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": lambda m, _: m.reduce(),
    "BUILD": lambda m, _: m.build(),
    "BINPERSID": _persistent,
    "STOP": _stop,
    "TUPLE": lambda m, _: m.stack.append(_Tuple(tuple(m.pop_to_mark()))),
    "TUPLE1": lambda m, _: m.tuple_of(1),
    "TUPLE2": lambda m, _: m.tuple_of(2),
    "TUPLE3": lambda m, _: m.tuple_of(3),
    "LIST": lambda m, _: _replace(m, _LIST),
    "DICT": lambda m, _: _replace(m, _DICT),
    "FROZENSET": lambda m, _: _replace(m, _OTHER),
    "SETITEM": lambda m, _: _filled(m, 2, "dict"),
    "SETITEMS": lambda m, _: _filled(m, None, "dict"),
    "APPEND": lambda m, _: _filled(m, 1, "list"),
    "APPENDS": lambda m, _: _filled(m, None, "list"),
    "ADDITEMS": lambda m, _: _filled(m, None, "set"),
    "POP": lambda m, _: m.drop(1),
    "POP_MARK": lambda m, _: m.drop(),
    "DUP": lambda m, _: m.double(),
    "PUT": lambda m, key: m.put(key),
    "BINPUT": lambda m, key: m.put(key),
    "LONG_BINPUT": lambda m, key: m.put(key),
    "MEMOIZE": lambda m, _: m.put(len(m.memo)),
    "GET": lambda m, key: m.stack.append(m.memo[int(key)]),
    "BINGET": lambda m, key: m.stack.append(m.memo[int(key)]),
    "LONG_BINGET": lambda m, key: m.stack.append(m.memo[int(key)]),
}
