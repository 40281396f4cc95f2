"""How our kernels are compiled: numba with our settings, cached on disk under a key that covers all of them."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any

import numba

_config: Any = numba.config

__all__ = ["compiled"]


def compiled(function: Any) -> Any:
    """`numba.njit` with our settings, cached on disk.

    Reassociation is allowed (it is what lets sums use vector registers) but not-a-number keeps its meaning: a
    diverging network must be noticed, and the usual `fastmath=True` would let the compiler assume it never happens.

    A kernel is inlined into every kernel that calls it. Otherwise the caller's object code holds a copy of it that is
    optimised once more and rounds differently, and which copy runs depends on what the process loaded before.
    """
    before = _config.CACHE_DIR
    _config.CACHE_DIR = str(_cache_directory())
    try:
        return numba.njit(
            fastmath={"contract", "reassoc", "arcp", "nsz", "afn"},
            error_model="numpy",
            nogil=True,
            cache=True,
            boundscheck=False,
            forceinline=True,
        )(function)
    finally:
        _config.CACHE_DIR = before


@cache
def _cache_directory() -> Path:
    # numba notices a change in the file of a kernel but not in the kernels it calls, so the key is all of them.
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "palaestra" / "kernels" / digest.hexdigest()[:16]
