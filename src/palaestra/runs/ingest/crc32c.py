"""The checksum of event files: CRC-32C (Castagnoli), rotated and shifted as TFRecord has it."""

from __future__ import annotations

import sys
from array import array
from functools import cache

__all__ = ["crc32c", "masked"]

_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8


def _entry(index: int) -> int:
    for _ in range(8):
        index = (index >> 1) ^ (_POLYNOMIAL if index & 1 else 0)
    return index


_TABLE = tuple(_entry(index) for index in range(256))


@cache
def _pairs() -> array[int]:
    """The table for two bytes at a time; a quarter of a megabyte that only readers of event files need."""
    table = _TABLE
    return array(
        "I", (table[(table[pair & 0xFF] ^ (pair >> 8)) & 0xFF] ^ (table[pair & 0xFF] >> 8) for pair in range(1 << 16))
    )


def crc32c(data: bytes) -> int:
    """The plain checksum."""
    crc, even = 0xFFFFFFFF, len(data) & ~1
    if even > 8 and sys.byteorder == "little":
        pairs = _pairs()
        for pair in memoryview(data)[:even].cast("H"):
            crc = pairs[(crc ^ pair) & 0xFFFF] ^ (crc >> 16)
        data = data[even:]
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    """As it stands in the file: a checksum of data that holds checksums must not look like one."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF
