"""A place in a file that somebody else is writing, shortening or replacing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["GrowingFile"]


class GrowingFile:
    """Reads on from `offset`; a file that does not exist yet is empty, one that shrank or was replaced begins anew."""

    def __init__(self, path: Path, offset: int = 0, inode: int = 0) -> None:
        self._path = path
        self.offset = offset
        """Where what was not read yet begins."""
        self.inode = inode
        """Which file that is; 0 before the first read."""

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[int, int] | None]:
        """A descriptor and the file's size; None when there is nothing behind `offset`."""
        try:
            fd = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            yield None
            return
        try:
            facts = os.fstat(fd)
            if self.inode not in (0, facts.st_ino) or facts.st_size < self.offset:
                self.offset = 0
                self._began_anew()
            self.inode = facts.st_ino
            yield (fd, facts.st_size) if facts.st_size > self.offset else None
        finally:
            os.close(fd)

    def _began_anew(self) -> None:
        """What was known about the old file is worth nothing."""
