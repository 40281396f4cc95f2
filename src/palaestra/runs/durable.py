"""Small files that are whole or not there, and lines that are appended once.

`kill -9` loses nothing that returned; a power cut loses nothing that was written with `durable`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palaestra.telemetry.json_number import dump_strict

__all__ = ["append_line", "read_json", "write_json", "write_text"]


def write_text(path: Path, text: str, *, mode: int = 0o644, durable: bool = True) -> None:
    """Replace a file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        # A disk that is full stays full as long as half a file lies on it.
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, data: Mapping[str, Any], *, mode: int = 0o644, durable: bool = True) -> None:
    """Replace a JSON document atomically."""
    write_text(path, dump_strict(data, indent=2, default=str) + "\n", mode=mode, durable=durable)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None when there is no file, or no object in it."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def append_line(path: Path, data: Mapping[str, Any], *, durable: bool = False) -> None:
    """Add one JSON line with one write; a line that a crash tore before is ended first."""
    line = dump_strict(data, separators=(",", ":"), default=str).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        written = os.write(descriptor, line)
        if written != len(line):
            raise OSError(f"{path}: only {written} of {len(line)} bytes fitted")
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
