"""`Screenshot`: the encoded image of a screen, with its size and SHA-256."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import Any

from palaestra.errors import SessionFailed


@dataclass(frozen=True, slots=True)
class Size:
    """Width and height in pixels."""

    width: int
    height: int


@dataclass(frozen=True)
class Screenshot:
    """An encoded image of a screen."""

    data: bytes = field(repr=False)
    size: Size
    media_type: str = "image/png"
    sha256: str = ""

    def __post_init__(self) -> None:
        if not self.sha256:
            object.__setattr__(self, "sha256", hashlib.sha256(self.data).hexdigest())

    @classmethod
    def of(cls, data: bytes) -> Screenshot:
        """The screenshot in these bytes; type and size are read from its header."""
        media_type, size = _read_header(data)
        return cls(data, size, media_type)

    def facts(self) -> dict[str, Any]:
        """Checksum, size and type as plain JSON, without the image."""
        return {
            "sha256": self.sha256,
            "width": self.size.width,
            "height": self.size.height,
            "media_type": self.media_type,
            "bytes": len(self.data),
        }


def _read_header(data: bytes) -> tuple[str, Size]:
    if data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) >= 24:
        return "image/png", Size(*struct.unpack(">II", data[16:24]))
    if data[:2] == b"\xff\xd8":
        at = 2
        while at + 9 < len(data) and data[at] == 0xFF:
            marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
            if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
                height, width = struct.unpack(">HH", data[at + 5 : at + 9])
                return "image/jpeg", Size(width, height)
            at += 2 + length
    raise SessionFailed("bad_screenshot", f"{len(data)} bytes from the screen are neither PNG nor JPEG")
