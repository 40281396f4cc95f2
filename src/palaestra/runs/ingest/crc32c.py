"""The checksum of event files: CRC-32C (Castagnoli), rotated and shifted as TFRecord has it."""

from __future__ import annotations

__all__ = ["crc32c", "masked"]

_POLYNOMIAL = 0x82F63B78
_MASK = 0xA282EAD8


def _entry(index: int) -> int:
    for _ in range(8):
        index = (index >> 1) ^ (_POLYNOMIAL if index & 1 else 0)
    return index


_TABLE = tuple(_entry(index) for index in range(256))


def crc32c(data: bytes) -> int:
    """The plain checksum."""
    crc, table = 0xFFFFFFFF, _TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    """As it stands in the file: a checksum of data that holds checksums must not look like one."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF
