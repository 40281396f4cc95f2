"""Reads a growing text file such as stdout.log: lines with their byte offsets, size, and tracebacks.

A line that is still being written is held back, invalid UTF-8 is replaced, and very long lines are split.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_BLOCK_BYTES = 1 << 20
_MAX_READ_BYTES = 1 << 22
"""Limit per call, so that one attempt does not delay the others."""
MAX_LINE_BYTES = 1 << 22
"""Longer lines are split. Enough for an update with 50,000 metrics."""
_TRACEBACK = b"Traceback (most recent call last)"
_BLOCKS_PER_SCAN = 8


class FileTail:
    """A position in a file that another process appends to.

    A missing file is empty. A file that shrank or was replaced is read from its beginning.
    """

    def __init__(self, path: Path, offset: int = 0, inode: int = 0) -> None:
        self._path = path
        self.offset = offset
        """Start of the unread part."""
        self.inode = inode
        """Identity of the file; 0 before the first read."""

    @contextlib.contextmanager
    def open_unread(self) -> Iterator[tuple[int, int] | None]:
        """Yield a descriptor and the file size; None when nothing is unread."""
        try:
            fd = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            yield None
            return
        try:
            stat = os.fstat(fd)
            if self.inode not in (0, stat.st_ino) or stat.st_size < self.offset:
                self.offset = 0
                self._reset()
            self.inode = stat.st_ino
            yield (fd, stat.st_size) if stat.st_size > self.offset else None
        finally:
            os.close(fd)

    def _reset(self) -> None:
        """Discard state about the previous file."""


class Line(NamedTuple):
    """A line without its newline, and its offset in the file."""

    text: str
    offset: int
    cut: bool = False
    """This is a piece of a line longer than `MAX_LINE_BYTES`."""


class LineTail(FileTail):
    """Reads the lines of one file; `offset` is the start of the next line.

    With `splits_returns` a carriage return ends a line, too, as in the output of a progress bar.
    """

    def __init__(self, path: Path, offset: int = 0, inode: int = 0, *, splits_returns: bool = False) -> None:
        super().__init__(path, offset, inode)
        self._splits_returns = splits_returns

    def read(self, limit: int, *, final: bool = False) -> list[Line]:
        """Return the next lines, at most `limit` and a few megabytes; `final` includes an unterminated last line."""
        with self.open_unread() as file:
            return [] if file is None else self._read_lines(file[0], limit, final)

    def _read_lines(self, fd: int, limit: int, final: bool) -> list[Line]:
        lines: list[Line] = []
        # Blocks of a line without its end so far; joined once, to avoid quadratic copying.
        parts: list[bytes] = []
        waiting = 0
        start = self.offset
        while len(lines) < limit and self.offset - start < _MAX_READ_BYTES:
            block = os.pread(fd, min(_BLOCK_BYTES, MAX_LINE_BYTES - waiting), self.offset + waiting)
            if not block:
                if final and waiting:
                    self._append(lines, b"".join(parts))
                break
            if self._splits_returns:
                block = block.replace(b"\r", b"\n")
            *complete, rest = block.split(b"\n")
            if complete:
                complete[0] = b"".join([*parts, complete[0]])
                parts, waiting = [], 0
            for line in complete[: limit - len(lines)]:
                self._append(lines, line, newline=1)
            parts.append(rest)
            waiting += len(rest)
            if waiting >= MAX_LINE_BYTES:
                self._append(lines, b"".join(parts), cut=True)
                parts, waiting = [], 0
        return lines

    def _append(self, lines: list[Line], data: bytes, newline: int = 0, *, cut: bool = False) -> None:
        lines.append(Line(data.rstrip(b"\r").decode("utf-8", "replace"), self.offset, cut))
        self.offset += len(data) + newline


class OutputScanner:
    """Tracks the size of an output file and counts Python tracebacks in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.size = 0
        self.tracebacks = 0

    def scan(self, *, to_end: bool = False) -> None:
        """Scan what was added since the last call, a few megabytes at a time unless `to_end`."""
        try:
            self.size = os.stat(self._path).st_size
        except FileNotFoundError:
            self.size = 0
        if self.size < self._offset:
            self._offset = 0
        if self.size == self._offset:
            return
        try:
            with self._path.open("rb", buffering=0) as file:
                blocks = 0
                while self._offset < self.size and (to_end or blocks < _BLOCKS_PER_SCAN):
                    # Overlap with the previous block, in case a marker was split between the two.
                    start = max(0, self._offset - len(_TRACEBACK) + 1)
                    block = os.pread(file.fileno(), _BLOCK_BYTES, start)
                    if start + len(block) <= self._offset:
                        break
                    self.tracebacks += block.count(_TRACEBACK)
                    self._offset = start + len(block)
                    blocks += 1
        except FileNotFoundError:
            return
