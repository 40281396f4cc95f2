"""One block of memory that two processes see, handed out as arrays in an order both follow.

Anonymous (it has no name), so nothing can be left behind whoever dies first.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["SharedArrays", "allocate_shared_block"]

_ALIGN = 64


class SharedArrays:
    """Hands out arrays one after the other over a block; without one, ordinary arrays while it adds up their size."""

    def __init__(self, block: Any = None) -> None:
        self._view = None if block is None else memoryview(block).cast("B")
        self.size = 0

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """The next array: zeroed when the block is fresh, else as the other side left it."""
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        at = self.size
        self.size += -(-count * kind.itemsize // _ALIGN) * _ALIGN
        if self._view is None:
            return np.zeros(shape, kind)
        return np.frombuffer(self._view, kind, count, at).reshape(shape)


def allocate_shared_block(lay: Callable[[SharedArrays], object]) -> Any:
    """A fresh block that is large enough for whatever `lay` asks for."""
    # Pages of zeroed arrays take no memory before they are written, so measuring costs none.
    measured = SharedArrays()
    lay(measured)
    return multiprocessing.get_context("spawn").RawArray("B", max(1, measured.size))
