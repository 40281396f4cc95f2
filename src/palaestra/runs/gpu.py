"""Which GPUs this machine has, as the driver's own tool says."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Gpu", "detected_gpus"]

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    index: str
    """What CUDA_VISIBLE_DEVICES calls it."""
    uuid: str = ""
    name: str = ""
    memory_mb: int = 0


def detected_gpus(
    run: Callable[..., Any] = subprocess.run, environment: Mapping[str, str] | None = None
) -> tuple[Gpu, ...]:
    """Every GPU that can be leased; none when there is no driver. `PALAESTRA_GPUS=0,1` says it without asking."""
    environment = os.environ if environment is None else environment
    told = environment.get("PALAESTRA_GPUS")
    if told is not None:
        return tuple(Gpu(index.strip()) for index in told.split(",") if index.strip())
    try:
        done = run(_QUERY, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return ()
    if done.returncode:
        return ()
    return tuple(gpu for line in done.stdout.splitlines() if (gpu := _read(line)) is not None)


def _read(line: str) -> Gpu | None:
    words = [word.strip() for word in line.split(",")]
    if len(words) < 4 or not words[0].isdecimal():
        return None
    # The name may hold commas; it stands between the second and the last word.
    memory = int(words[-1]) if words[-1].isdecimal() else 0
    return Gpu(words[0], words[1], ",".join(words[2:-1]), memory)
