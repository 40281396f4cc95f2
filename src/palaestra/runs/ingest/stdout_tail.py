"""Lines of a growing file by their byte offsets: output that anybody may write anything into.

Holds back a line that is still being written, replaces bytes that are not text, and shortens lines that never end.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from palaestra.runs.ingest.growing_file import GrowingFile

__all__ = ["Line", "LineTail"]

_BLOCK_BYTES = 1 << 20
_BLOCKS_PER_READ = 4
LONGEST_LINE = 1 << 18
"""Bytes of a line that are kept; the rest of it is skipped."""


class Line(NamedTuple):
    """A line without its end, and where in the file it begins."""

    text: str
    offset: int


class LineTail(GrowingFile):
    """The lines of one file; `offset` is where the next one begins."""

    def read(self, limit: int, *, final: bool = False) -> list[Line]:
        """The next lines, at most `limit` and a few megabytes; `final` also gives a last line without an end."""
        with self.opened() as file:
            return [] if file is None else self._lines(file[0], limit, final)

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
