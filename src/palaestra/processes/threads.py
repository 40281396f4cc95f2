"""Limits the number of threads for arithmetic during training.

Small matrices on several threads mostly wait for each other: two thread pools on two busy cores were nineteen times
slower. OpenBLAS is limited to one thread for another reason, too: its sums depend on the number of threads, and the
same seed has to give the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch
from threadpoolctl import ThreadpoolController


@cache
def _openblas() -> Any:
    # The kernels use scipy's BLAS, which numba loads at the first call: too late to be found here.
    import_module("scipy.linalg.cython_blas")
    # Cached, because searching for loaded libraries takes milliseconds.
    return ThreadpoolController().select(internal_api="openblas")


@contextmanager
def limit_threads(torch_threads: int | None) -> Iterator[None]:
    """Limit OpenBLAS to one thread and torch to `torch_threads` (None: unchanged) inside the block."""
    before = torch.get_num_threads()
    with _openblas().limit(limits=1):
        if torch_threads is not None and torch_threads != before:
            torch.set_num_threads(torch_threads)
        try:
            yield
        finally:
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)
