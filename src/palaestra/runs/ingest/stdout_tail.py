"""Lines of a growing file by their byte offsets: output that anybody may write anything into.

Holds back a line that is still being written, replaces bytes that are not text, and cuts lines that never end.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from palaestra.runs.ingest.growing_file import GrowingFile

__all__ = ["LONGEST_LINE", "Line", "LineTail"]

_BLOCK_BYTES = 1 << 20
_MOST_BYTES = 1 << 22
"""Given per call, so that one attempt does not hold up the others."""
LONGEST_LINE = 1 << 22
"""Bytes of a line that are given as one; a longer one comes in pieces. Holds an update of 50,000 metrics."""


class Line(NamedTuple):
    """A line without its end, and where in the file it begins."""

    text: str
    offset: int
    cut: bool = False
    """It is longer than `LONGEST_LINE` and this is a piece of it."""


class LineTail(GrowingFile):
    """The lines of one file; `offset` is where the next one begins."""

    def read(self, limit: int, *, final: bool = False) -> list[Line]:
        """The next lines, at most `limit` and a few megabytes; `final` also gives a last line without an end."""
        with self.opened() as file:
            return [] if file is None else self._lines(file[0], limit, final)

    def _lines(self, fd: int, limit: int, final: bool) -> list[Line]:
        lines: list[Line] = []
        # Blocks of a line whose end has not come yet; joined once, however many there are.
        begun: list[bytes] = []
        waiting = 0
        start = self.offset
        while len(lines) < limit and self.offset - start < _MOST_BYTES:
            block = os.pread(fd, min(_BLOCK_BYTES, LONGEST_LINE - waiting), self.offset + waiting)
            if not block:
                if final and waiting:
                    self._give(lines, b"".join(begun))
                break
            *whole, rest = block.split(b"\n")
            if whole:
                whole[0] = b"".join([*begun, whole[0]])
                begun, waiting = [], 0
            for line in whole[: limit - len(lines)]:
                self._give(lines, line, end=1)
            begun.append(rest)
            waiting += len(rest)
            if waiting >= LONGEST_LINE:
                self._give(lines, b"".join(begun), cut=True)
                begun, waiting = [], 0
        return lines

    def _give(self, lines: list[Line], data: bytes, end: int = 0, *, cut: bool = False) -> None:
        lines.append(Line(data.rstrip(b"\r").decode("utf-8", "replace"), self.offset, cut))
        self.offset += len(data) + end
