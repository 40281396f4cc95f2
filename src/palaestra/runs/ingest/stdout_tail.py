"""Lines of a growing file by their byte offsets: output that anybody may write anything into.

Holds back a line that is still being written, replaces bytes that are not text, and shortens lines that never end.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

__all__ = ["Line", "LineTail"]

_BLOCK_BYTES = 1 << 20
_BLOCKS_PER_READ = 4
LONGEST_LINE = 1 << 18
"""Bytes of a line that are kept; the rest of it is skipped."""


class Line(NamedTuple):
    """A line without its end, and where in the file it begins."""

    text: str
    offset: int


class LineTail:
    """Reads on from `offset`; a file that does not exist yet is empty, one that shrank or was replaced begins anew."""

    def __init__(self, path: Path, offset: int = 0, inode: int = 0) -> None:
        self._path = path
        self.offset = offset
        """Where the next line begins."""
        self.inode = inode
        """Which file that is; 0 before the first read."""

    def read(self, limit: int, *, final: bool = False) -> list[Line]:
        """The next lines, at most `limit` and a few megabytes; `final` also gives a last line without an end."""
        try:
            fd = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return []
        try:
            facts = os.fstat(fd)
            if self.inode not in (0, facts.st_ino) or facts.st_size < self.offset:
                self.offset = 0
            self.inode = facts.st_ino
            return self._lines(fd, limit, final) if facts.st_size > self.offset else []
        finally:
            os.close(fd)

    def _lines(self, fd: int, limit: int, final: bool) -> list[Line]:
        lines: list[Line] = []
        rest, skipped = b"", 0
        for _ in range(_BLOCKS_PER_READ):
            if len(lines) >= limit:
                break
            block = os.pread(fd, _BLOCK_BYTES, self.offset + len(rest) + skipped)
            if not block:
                if final and rest:
                    self._give(lines, rest, skipped)
                break
            *whole, rest_of_block = block.split(b"\n")
            if whole:
                whole[0] = rest + whole[0]
                rest = rest_of_block
            else:
                rest += rest_of_block
            for line in whole[: limit - len(lines)]:
                self._give(lines, line, skipped, end=1)
                skipped = 0
            if len(lines) >= limit:
                break
            if len(rest) > LONGEST_LINE:
                skipped += len(rest) - LONGEST_LINE
                rest = rest[:LONGEST_LINE]
        else:
            if not lines and rest:
                # Megabytes without an end of line: what there is so far stands for a line.
                self._give(lines, rest, skipped)
        return lines

    def _give(self, lines: list[Line], data: bytes, skipped: int, end: int = 0) -> None:
        lines.append(Line(data[:LONGEST_LINE].rstrip(b"\r").decode("utf-8", "replace"), self.offset))
        self.offset += len(data) + skipped + end
