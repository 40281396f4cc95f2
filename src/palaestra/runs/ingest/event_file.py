"""Reads scalars from TensorBoard event files while they are written.

A record is its length, a checksum of the length, the payload and a checksum of the payload. An incomplete record is
waited for. After damage, reading continues at the next position where eight bytes and their checksum agree, so a
flipped bit costs one record; TensorBoard's own loader stops there. These fields of the protobuf payload are read:

    Event { 1 wall_time: double, 2 step: int64, 5 summary, 7 session_log }
    Summary { 1 value* }    Value { 1 tag, 2 simple_value: float, 8 tensor, 9 metadata }
    Tensor { 1 dtype, 4 content, 5 float_val*, 6 double_val* }    SessionLog { 1 status }
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from palaestra.runs.ingest.stdout import FileTail

_HEADER = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_FRAME_BYTES = _HEADER.size + _CHECKSUM.size
_BLOCK_BYTES = 1 << 20
_MAX_READ_BYTES = 1 << 22
_MAX_PAYLOAD_BYTES = 1 << 20
"""Longer payloads are images, audio or graphs; they are skipped unread."""
_ZEROS = bytes(5)


class EventRecord(NamedTuple):
    """The payload of one record and the offset of the record in the file."""

    offset: int
    payload: bytes


class EventFileTail(FileTail):
    """Reads the records of one event file; `offset` is the start of the next record."""

    def __init__(self, path: Path, offset: int = 0, inode: int = 0) -> None:
        super().__init__(path, offset, inode)
        self._searching = False
        self.corruptions = 0
        """Number of damaged sections that were skipped."""

    def read(self, limit: int) -> list[EventRecord]:
        """Return the next complete records, at most `limit` and a few megabytes."""
        records: list[EventRecord] = []
        read_limit = self.offset + _MAX_READ_BYTES
        with self.open_unread() as file:
            if file is None:
                return records
            fd, size = file
            while len(records) < limit and self.offset < min(read_limit, size):
                before = self.offset
                self._read_block(fd, size, limit, records)
                if self.offset == before:
                    break  # the rest is an incomplete record
        return records

    def skip_rest(self) -> None:
        """Skip an incomplete record at the end and count it as damage; for files that are no longer written."""
        try:
            size = os.stat(self._path).st_size
        except FileNotFoundError:
            return
        if size > self.offset:
            self.corruptions += not self._searching
            self.offset, self._searching = size, False

    def _reset(self) -> None:
        self._searching = False

    def _read_block(self, fd: int, size: int, limit: int, records: list[EventRecord]) -> None:
        start = self.offset
        block = os.pread(fd, _BLOCK_BYTES + _FRAME_BYTES, start)
        at = 0
        while len(records) < limit and len(block) - at >= _HEADER.size:
            length, checksum = _HEADER.unpack_from(block, at)
            if _length_checksum(length) != checksum:
                at = self._find_next_record(block, at)
                continue
            self._searching = False
            end = at + _FRAME_BYTES + length
            if length > _MAX_PAYLOAD_BYTES:
                if start + end > size:
                    break
                self.offset = start + end
                return
            if end > len(block):
                break
            payload = block[at + _HEADER.size : end - _CHECKSUM.size]
            if masked_crc32c(payload) != _CHECKSUM.unpack_from(block, end - _CHECKSUM.size)[0]:
                at = self._find_next_record(block, at)
                continue
            records.append(EventRecord(start + at, payload))
            at = end
        self.offset = start + at

    def _find_next_record(self, block: bytes, damaged: int) -> int:
        """Return the next position in the block that looks like a record; its end when there is none."""
        if not self._searching:
            self.corruptions += 1
            self._searching = True
        at = damaged
        # Lengths up to the maximum leave five of their eight bytes zero.
        while (zeros := block.find(_ZEROS, at + 1 + 3)) >= 0:
            at = zeros - 3
            if len(block) - at < _HEADER.size:
                break
            length, checksum = _HEADER.unpack_from(block, at)
            if _length_checksum(length) == checksum:
                return at
        return max(damaged + 1, len(block) - _HEADER.size + 1)


@lru_cache(maxsize=1024)
def _length_checksum(length: int) -> int:
    # Cached because the records of a trainer have few different lengths.
    return masked_crc32c(length.to_bytes(8, "little"))


def _crc_table_entry(index: int) -> int:
    for _ in range(8):
        index = (index >> 1) ^ (0x82F63B78 if index & 1 else 0)
    return index


_CRC_TABLE = tuple(_crc_table_entry(index) for index in range(256))


@cache
def _crc_pair_table() -> array[int]:
    """Build the table for two bytes at a time (256 KB, only when event files are read)."""
    table = _CRC_TABLE
    return array(
        "I", (table[(table[pair & 0xFF] ^ (pair >> 8)) & 0xFF] ^ (table[pair & 0xFF] >> 8) for pair in range(1 << 16))
    )


def crc32c(data: bytes) -> int:
    """Compute CRC-32C (Castagnoli)."""
    crc, even = 0xFFFFFFFF, len(data) & ~1
    if even > 8 and sys.byteorder == "little":
        pairs = _crc_pair_table()
        for pair in memoryview(data)[:even].cast("H"):
            crc = pairs[(crc ^ pair) & 0xFFFF] ^ (crc >> 16)
        data = data[even:]
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """Compute the checksum as TFRecord stores it, so that data with checksums in it does not look like one."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


class ScalarRecord(NamedTuple):
    """The scalars of one record."""

    wall_time: float
    step: int
    values: tuple[tuple[str, float], ...]
    """Tags and values; empty for images, texts and graphs."""
    session_start: bool = False
    """The trainer restarted: earlier records from this step on are void."""


_DOUBLE = struct.Struct("<d")
_FLOAT = struct.Struct("<f")
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SESSION_STARTED = 1


def parse_scalars(payload: bytes) -> ScalarRecord:
    """Parse the scalars of a record. Raises `ValueError` when the payload is not an event."""
    wall_time, step, session_start = 0.0, 0, False
    values: list[tuple[str, float]] = []
    try:
        record = _parse_single_scalar(payload)
        if record is not None:
            return record
        for field, number, data in _fields(payload):
            if field == (1, _FIXED64):
                (wall_time,) = _DOUBLE.unpack(data)
            elif field == (2, _VARINT):
                step = _to_signed(number)
            elif field == (5, _BYTES):
                values.extend(_parse_summary(data))
            elif field == (7, _BYTES):
                session_start = any(inner[0] == 1 and status == _SESSION_STARTED for inner, status, _ in _fields(data))
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"not an event: {error}") from None
    return ScalarRecord(wall_time, step, tuple(values), session_start)


def _parse_single_scalar(data: bytes) -> ScalarRecord | None:
    """Parse the common layout fast: a time, a step and one value in this order; None for any other."""
    size = len(data)
    if size < 24 or data[0] != 0x09 or data[9] != 0x10 or data[size - 5] != 0x15:
        return None
    step, at = _read_varint(data, 10)
    # Summary, value and tag must each fill the rest of the record.
    for key, end in ((0x2A, size), (0x0A, size), (0x0A, size - 5)):
        if data[at] != key:
            return None
        length, at = _read_varint(data, at + 1)
        if at + length != end:
            return None
    tag, (value,) = data[at : size - 5].decode("utf-8"), _FLOAT.unpack_from(data, size - 4)
    return ScalarRecord(_DOUBLE.unpack_from(data, 1)[0], _to_signed(step), ((tag, value),))


def _parse_summary(summary: bytes) -> Iterator[tuple[str, float]]:
    for outer, _, content in _fields(summary):
        if outer != (1, _BYTES):
            continue
        tag: str | None = None
        scalar: float | None = None
        for field, _, data in _fields(content):
            if field == (1, _BYTES):
                tag = data.decode("utf-8")
            elif field == (2, _FIXED32):
                (scalar,) = _FLOAT.unpack(data)
            elif field == (8, _BYTES):
                scalar = _parse_tensor(data)
        if tag is not None and scalar is not None:
            yield tag, scalar


def _parse_tensor(tensor: bytes) -> float | None:
    """Return the value of a float or double tensor with one element; None for any other tensor."""
    dtype, content = 0, b""
    for field, number, data in _fields(tensor):
        if field == (1, _VARINT):
            dtype = number
        elif field in ((4, _BYTES), (5, _BYTES), (6, _BYTES), (5, _FIXED32), (6, _FIXED64)):
            content += data
    layout = {1: _FLOAT, 2: _DOUBLE}.get(dtype)
    return float(layout.unpack(content)[0]) if layout is not None and len(content) == layout.size else None


def _fields(data: bytes) -> Iterator[tuple[tuple[int, int], int, bytes]]:
    """Yield each protobuf field as (number, wire type), its value if it is a varint, else its bytes."""
    at, size = 0, len(data)
    while at < size:
        key, at = _read_varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _read_varint(data, at)
            yield (number, wire), value, b""
            continue
        if wire == _BYTES:
            length, at = _read_varint(data, at)
        else:
            length = {_FIXED64: 8, _FIXED32: 4}.get(wire, -1)
        if length < 0 or at + length > size or number == 0:
            raise ValueError("not an event: an invalid field, or one that exceeds its record")
        yield (number, wire), 0, data[at : at + length]
        at += length


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("not an event: a number without an end")


def _to_signed(value: int) -> int:
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >= 1 << 63 else value
