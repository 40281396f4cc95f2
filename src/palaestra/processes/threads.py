"""How many threads arithmetic may use while we train, put back afterwards.

Small matrices on several threads spend their time waiting for each other: two spinning pools on two busy cores were
nineteen times slower. OpenBLAS is held to one thread for a second reason: its sums change with the thread count, and
the same seed has to give the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch
from threadpoolctl import ThreadpoolController

__all__ = ["limit_threads"]


@cache
def _openblas() -> Any:
    # The kernels' matrix product is scipy's BLAS, which numba loads at the first call: too late to be found here.
    import_module("scipy.linalg.cython_blas")
    # Looking for loaded libraries takes milliseconds, so it is done once.
    return ThreadpoolController().select(internal_api="openblas")


@contextmanager
def limit_threads(torch_threads: int | None) -> Iterator[None]:
    """OpenBLAS on one thread, torch on `torch_threads` (None: as it is), inside the block."""
    before = torch.get_num_threads()
    with _openblas().limit(limits=1):
        if torch_threads is not None and torch_threads != before:
            torch.set_num_threads(torch_threads)
        try:
            yield
        finally:
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)
