"""What can be said of a trainer's output without understanding it: how long it is, and whether Python complained."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["OutputWatch"]

_MARK = b"Traceback (most recent call last)"
_BLOCK_BYTES = 1 << 20
_BLOCKS_PER_LOOK = 8


class OutputWatch:
    """Looks at a growing file from its beginning; a missing one is empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.size = 0
        self.tracebacks = 0

    def look(self, *, to_end: bool = False) -> None:
        """Take in what was added, a few megabytes at a time."""
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
                while self._offset < self.size and (to_end or blocks < _BLOCKS_PER_LOOK):
                    # Begins a little earlier, for a mark that the last look cut in two; it counts where it ends.
                    start = max(0, self._offset - len(_MARK) + 1)
                    block = os.pread(file.fileno(), _BLOCK_BYTES, start)
                    if start + len(block) <= self._offset:
                        break
                    self.tracebacks += block.count(_MARK)
                    self._offset = start + len(block)
                    blocks += 1
        except FileNotFoundError:
            return
