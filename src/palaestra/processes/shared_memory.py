"""Arrays in a block of memory that two processes share. Both allocate the arrays in the same order.

The block is anonymous (it has no name), so nothing is left behind if a process dies.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ALIGN = 64


class SharedArrays:
    """Allocates arrays one after the other in a block; without a block, ordinary arrays, to measure the `size`."""

    def __init__(self, block: Any = None) -> None:
        self._view = None if block is None else memoryview(block).cast("B")
        self.size = 0

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """The next array: zeros in a new block, otherwise the values of the other process."""
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        offset = self.size
        self.size += -(-count * kind.itemsize // _ALIGN) * _ALIGN
        if self._view is None:
            return np.zeros(shape, kind)
        return np.frombuffer(self._view, kind, count, offset).reshape(shape)


def allocate_shared_block(allocate: Callable[[SharedArrays], object]) -> Any:
    """A new block that is large enough for all arrays that `allocate` requests."""
    # Pages of zeroed arrays take no memory before they are written, so measuring is free.
    measured = SharedArrays()
    allocate(measured)
    return multiprocessing.get_context("spawn").RawArray("B", max(1, measured.size))
