"""The scalars in one record of an event file: the few protobuf fields that hold them, read by hand.

    Event { 1 wall_time: double, 2 step: int64, 5 summary, 7 session_log }
    Summary { 1 value* }    Value { 1 tag, 2 simple_value: float, 8 tensor, 9 metadata }
    Tensor { 1 dtype, 4 content, 5 float_val*, 6 double_val* }    SessionLog { 1 status }

Everything else is skipped. A record that is no protobuf is a `ValueError`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["ScalarRecord", "read_event"]

_DOUBLE = struct.Struct("<d")
_FLOAT = struct.Struct("<f")
_START = 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class ScalarRecord(NamedTuple):
    """What one record says."""

    wall_time: float
    step: int
    values: tuple[tuple[str, float], ...]
    """Tags and their values; empty for pictures, texts, graphs."""
    session_start: bool = False
    """The trainer started again: whatever was written for this step and later is void."""


def read_event(payload: bytes) -> ScalarRecord:
    """The scalars of a record."""
    wall_time, step, session_start = 0.0, 0, False
    values: list[tuple[str, float]] = []
    try:
        usual = _usual(payload)
        if usual is not None:
            return usual
        for number, wire, value in _fields(payload):
            if number == 1 and wire == _FIXED64:
                (wall_time,) = _DOUBLE.unpack(_raw(value))
            elif number == 2 and wire == _VARINT:
                step = _signed(value)
            elif number == 5 and wire == _BYTES:
                values.extend(_summary(_raw(value)))
            elif number == 7 and wire == _BYTES:
                session_start = any(n == 1 and v == _START for n, _, v in _fields(_raw(value)))
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"not an event: {error}") from None
    return ScalarRecord(wall_time, step, tuple(values), session_start)


def _usual(data: bytes) -> ScalarRecord | None:
    """A time, a step and one number in the order in which everybody writes them; None for anything else."""
    size = len(data)
    if size < 24 or data[0] != 0x09 or data[9] != 0x10 or data[size - 5] != 0x15:
        return None
    step, at = _varint(data, 10)
    # Summary, value and tag, each reaching as far as it can: then nothing else is in between.
    for key, end in ((0x2A, size), (0x0A, size), (0x0A, size - 5)):
        if data[at] != key:
            return None
        length, at = _varint(data, at + 1)
        if at + length != end:
            return None
    tag, (value,) = data[at : size - 5].decode("utf-8"), _FLOAT.unpack_from(data, size - 4)
    return ScalarRecord(_DOUBLE.unpack_from(data, 1)[0], _signed(step), ((tag, value),))


def _summary(data: bytes) -> Iterator[tuple[str, float]]:
    for number, wire, value in _fields(data):
        if number == 1 and wire == _BYTES:
            found = _value(_raw(value))
            if found is not None:
                yield found


def _value(data: bytes) -> tuple[str, float] | None:
    tag: str | None = None
    scalar: float | None = None
    for number, wire, value in _fields(data):
        if number == 1 and wire == _BYTES:
            tag = _raw(value).decode("utf-8")
        elif number == 2 and wire == _FIXED32:
            (scalar,) = _FLOAT.unpack(_raw(value))
        elif number == 8 and wire == _BYTES:
            scalar = _tensor(_raw(value))
    return None if tag is None or scalar is None else (tag, scalar)


def _tensor(data: bytes) -> float | None:
    """The one number in a tensor of floats or doubles; None when it holds anything else."""
    dtype, content = 0, b""
    for number, wire, value in _fields(data):
        if number == 1 and wire == _VARINT and isinstance(value, int):
            dtype = value
        elif (number in (4, 5, 6) and wire == _BYTES) or (number, wire) in ((5, _FIXED32), (6, _FIXED64)):
            content += _raw(value)
    kind = {1: _FLOAT, 2: _DOUBLE}.get(dtype)
    return float(kind.unpack(content)[0]) if kind is not None and len(content) == kind.size else None


def _fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    at, size = 0, len(data)
    while at < size:
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, wire, value
            continue
        if wire == _BYTES:
            length, at = _varint(data, at)
        else:
            length = {_FIXED64: 8, _FIXED32: 4}.get(wire, -1)
        if length < 0 or at + length > size or number == 0:
            raise ValueError("not an event: a field that is no field, or that ends behind its record")
        yield number, wire, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("not an event: a number that does not end")


def _signed(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("not an event: bytes where a number belongs")
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >= 1 << 63 else value


def _raw(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("not an event: a number where bytes belong")
    return value
