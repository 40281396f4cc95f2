"""Compilation of the kernels: numba with fixed settings, cached on disk under a key of all kernel sources."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any

import numba

_config: Any = numba.config


def compile_kernel(function: Any) -> Any:
    """`numba.njit` with our settings, cached on disk.

    Reassociation is allowed, because vectorised sums need it, but NaN keeps its meaning: a diverging network must be
    detected, and `fastmath=True` would let the compiler assume that there is no NaN.

    A kernel is inlined into every kernel that calls it. Otherwise the object code of the caller has a copy that is
    optimised differently and rounds differently, and which copy runs depends on what the process loaded before.
    """
    previous = _config.CACHE_DIR
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
        _config.CACHE_DIR = previous


@cache
def _cache_directory() -> Path:
    # numba detects a change in the file of a kernel but not in the kernels it calls, so the key covers all files.
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "palaestra" / "kernels" / digest.hexdigest()[:16]
