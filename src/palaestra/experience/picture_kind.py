"""What kind of picture some bytes are, told from the bytes."""

from __future__ import annotations

__all__ = ["picture_kind"]

_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8": "jpeg"}


def picture_kind(data: bytes) -> str:
    """`png`, `jpeg`, `webp`, or `bin` for what is none of them."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return next((kind for signature, kind in _SIGNATURES.items() if data.startswith(signature)), "bin")
