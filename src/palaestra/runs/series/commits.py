"""How much of the series counts: one line after every flush, believed only with its checksum.

Points are written first and counted afterwards. Killed in between, the next writer cuts the files back to the count
and reads the journal on from the cursor beside it, so every record becomes points exactly once.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palaestra.files.atomic import write_text
from palaestra.telemetry.journal import Cursor

__all__ = ["Commit", "CommitLog", "last_commit"]

_LONGEST = 256 * 1024
_SPAN = 64 * 1024


@dataclass(frozen=True)
class Commit:
    """The journal up to `cursor` is in the series, as the first `counts[i]` points of metric i."""

    cursor: Cursor = field(default_factory=Cursor)
    counts: tuple[int, ...] = ()
    tally: dict[str, Any] = field(default_factory=dict)
    """What else was counted on the way."""
    boot_id: str = ""
    whole: bool = False
    """The disk has it all; else a power cut may have taken part, and another boot trusts none of it."""


class CommitLog:
    """Appends commits; starts over with the newest when it has grown long."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, commit: Commit, *, durable: bool = False) -> None:
        """Make it count."""
        line = _line(commit)
        try:
            long = self._path.stat().st_size > _LONGEST
        except FileNotFoundError:
            long = True
        if long or durable:
            write_text(self._path, line, durable=durable)
            return
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            data = line.encode()
            written = os.write(descriptor, data)
            if written != len(data):
                raise OSError(28, f"only {written} of {len(data)} bytes fitted", str(self._path))
        finally:
            os.close(descriptor)


def last_commit(path: Path) -> Commit | None:
    """The newest line whose checksum is right; None when there is none."""
    try:
        with path.open("rb", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            span = _SPAN
            while size:
                start = max(0, size - span)
                file.seek(start)
                lines = (file.read(size - start) or b"").split(b"\n")
                for line in reversed(lines if start == 0 else lines[1:]):
                    commit = _read(line)
                    if commit is not None:
                        return commit
                if start == 0:
                    break
                span *= 4
    except FileNotFoundError:
        pass
    return None


def _line(commit: Commit) -> str:
    body = json.dumps(
        {
            "schema": 1,
            "cursor": list(commit.cursor),
            "counts": list(commit.counts),
            "tally": commit.tally,
            "boot_id": commit.boot_id,
            "whole": commit.whole,
        },
        separators=(",", ":"),
    )
    # The newline in front ends whatever a full disk left of the line before.
    return f"\n{zlib.crc32(body.encode()):08x} {body}\n"


def _read(line: bytes) -> Commit | None:
    checksum, _, body = line.partition(b" ")
    try:
        if not body or int(checksum, 16) != zlib.crc32(body):
            return None
        data = json.loads(body)
        if data["schema"] != 1:
            return None
        return Commit(Cursor(*data["cursor"]), tuple(data["counts"]), data["tally"], data["boot_id"], data["whole"])
    except (KeyError, TypeError, ValueError):
        return None
