"""Whether a checkpoint of unknown origin is only weights: looked at byte by byte, never loaded.

Safetensors hold no code. What torch saves is a zip with a pickle in it, and a zip can be read in more than one way: so
everything that two readers might see differently (bytes in front, a comment, two members of one name, a name that is
not torch's) is refused, and the pickle is followed by `pickle_machine`.
"""

from __future__ import annotations

import json
import re
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO

from palaestra.runs.checkpoints.pickle_machine import NoPickle, PickleRefused, pickle_globals

__all__ = ["SB3_WEIGHTS", "ScanReport", "scan"]

SB3_WEIGHTS = "policy.pth"
"""The member of a Stable-Baselines3 zip that holds weights; what else is in there holds pickled code."""

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
    """What a file is, and whether it can be taken in."""

    safe: bool
    format: str
    """`safetensors`, `torch_zip`, `sb3_zip`, `pickle` or `unknown`."""
    globals: tuple[str, ...] = ()
    """What its pickle would import, when that was found out."""
    reason: str = ""
    """Why it is not safe, as the end of a sentence that begins with its name."""


_STRANGE = ScanReport(False, "unknown", reason="is no format of checkpoints that we know")


class _Unsafe(Exception):
    pass


def scan(path: Path) -> ScanReport:
    """Look at a file. `OSError` when it cannot be read."""
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
            return _scan_bare(file)
    return _STRANGE


def _scan_bare(file: IO[bytes]) -> ScanReport:
    """Files of nothing but pickles: never taken in, but told what they would do."""
    data = file.read(MAX_PICKLE_BYTES)
    try:
        found = pickle_globals(data)
    except NoPickle:
        if data.startswith(b"\x80"):
            return ScanReport(False, "pickle", reason="is a bare pickle, and a damaged one or cut short")
        return _STRANGE
    except PickleRefused as error:
        return ScanReport(False, "pickle", reason=f"is a bare pickle: {error}")
    return ScanReport(False, "pickle", found, "is a bare pickle, which no loader of weights reads")


def _scan_safetensors(file: IO[bytes], size: int) -> ScanReport:
    def refused(reason: str) -> ScanReport:
        return ScanReport(False, "safetensors", reason=reason)

    (length,) = struct.unpack("<Q", file.read(8))
    if length > min(_MAX_HEADER_BYTES, size - 8):
        return refused(f"has a header of {length} bytes in a file of {size}")
    try:
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        spans = sorted((int(t["data_offsets"][0]), int(t["data_offsets"][1]), str(t["dtype"])) for t in header.values())
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return refused("has a header that cannot be read")
    position = 0
    for begin, end, dtype in spans:
        if begin != position or end < begin or not _SAFE_DTYPES.fullmatch(dtype):
            return refused("has tensors that overlap, leave gaps, or are of no known kind")
        position = end
    if 8 + length + position != size:
        return refused(f"should have {8 + length + position} bytes and has {size}: truncated or added to")
    return ScanReport(True, "safetensors")


def _scan_zip(file: IO[bytes]) -> ScanReport:
    form = "torch_zip"
    try:
        with zipfile.ZipFile(file) as archive:
            names = _checked_members(file, archive)
            if SB3_WEIGHTS in names and "data" in names:
                form = "sb3_zip"
                inner = BytesIO(_content(archive, SB3_WEIGHTS))
                with zipfile.ZipFile(inner) as weights:
                    return ScanReport(True, form, _scan_torch(weights, _checked_members(inner, weights)))
            return ScanReport(True, form, _scan_torch(archive, names))
    except _Unsafe as error:
        return ScanReport(False, form, reason=str(error))
    except PickleRefused as error:
        return ScanReport(False, form, reason=f"holds a pickle that cannot be trusted: {error}")
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError, ValueError) as e:
        return ScanReport(False, form, reason=f"is a damaged or unusual zip ({e})")


def _checked_members(file: IO[bytes], archive: zipfile.ZipFile) -> Sequence[str]:
    """The names of a zip that everybody reads in the same way."""
    members = archive.infolist()
    names = [member.filename for member in members]
    if not members or len(members) > MAX_MEMBERS:
        raise _Unsafe(f"is a zip with {len(members)} members")
    # A comment, or anything behind the last record, can hold a second directory that another reader believes.
    file.seek(-_END.size, 2)
    end = _END.unpack(file.read(_END.size))
    if end[0] != b"PK\x05\x06" or end[-1] != 0 or archive.comment:
        raise _Unsafe("is a zip with something behind its end")
    if min(member.header_offset for member in members) != 0:
        raise _Unsafe("is a zip with something in front of it")
    if len(set(names)) != len(names) or len({name.lower() for name in names}) != len(names):
        raise _Unsafe("is a zip in which two members have one name")
    for member in members:
        name = member.filename
        if name.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", name) or "\0" in member.orig_filename:
            raise _Unsafe(f"is a zip with a member that leaves its directory ({name!r})")
        if member.flag_bits & 0x1:
            raise _Unsafe(f"is a zip with an encrypted member ({name!r})")
        if member.file_size > MAX_RATIO * max(member.compress_size, 1):
            raise _Unsafe(f"is a zip that would swell more than {MAX_RATIO} times ({name!r})")
    return names


def _scan_torch(archive: zipfile.ZipFile, names: Sequence[str]) -> tuple[str, ...]:
    strangers = [name for name in names if not _TORCH_MEMBER.fullmatch(name)]
    if strangers:
        raise _Unsafe(f"is a zip with a member that torch does not write there ({strangers[0]!r})")
    roots = {name.partition("/")[0] for name in names}
    root = roots.pop()
    if roots or f"{root}/data.pkl" not in names:
        raise _Unsafe("is a zip, but not one that torch wrote")
    found = pickle_globals(_content(archive, f"{root}/data.pkl"))
    # Reads every member to its end: sizes, names and checksums of the zip must be true.
    damaged = archive.testzip()
    if damaged is not None:
        raise _Unsafe(f"is damaged: the checksum of {damaged!r} is wrong")
    return found


def _content(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > MAX_PICKLE_BYTES and not name.endswith(".pth"):
        raise _Unsafe(f"holds a pickle of more than {MAX_PICKLE_BYTES >> 20} MB")
    with archive.open(name) as member:
        return member.read()
