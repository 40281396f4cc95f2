"""Which GPUs this machine has, as the driver's own tool says."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
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
    """Every GPU that can be leased; none when there is no driver. `PALAESTRA_GPUS=0,1` says it without asking.

    Those that CUDA_VISIBLE_DEVICES withholds from us are not ours to give away.
    """
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
    found = tuple(gpu for line in done.stdout.splitlines() if (gpu := _read(line)) is not None)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return found if visible is None else tuple(_visible(found, visible))


def _visible(found: tuple[Gpu, ...], words: str) -> Iterator[Gpu]:
    """In the order of the words; as CUDA has it, what comes behind one that fits none is not seen either."""
    for word in (part.strip() for part in words.split(",")):
        fitting = [gpu for gpu in found if word == gpu.index or (word and gpu.uuid.startswith(word))]
        if word.startswith("MIG-"):
            # A part of a GPU has a name of its own, which the query does not list.
            fitting = [Gpu(word)]
        if not fitting:
            return
        yield fitting[0]


def _read(line: str) -> Gpu | None:
    words = [word.strip() for word in line.split(",")]
    if len(words) < 4 or not words[0].isdecimal():
        return None
    # The name may hold commas; it stands between the second and the last word.
    memory = int(words[-1]) if words[-1].isdecimal() else 0
    return Gpu(words[0], words[1], ",".join(words[2:-1]), memory)
