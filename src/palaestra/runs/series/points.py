"""How points and buckets lie in files: fixed records, little-endian, appended and never changed."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["BUCKET", "FAN", "LEVELS", "POINT", "Records", "as_buckets", "closed", "level_path", "read_records"]

Records: TypeAlias = npt.NDArray[np.void]

FAN = 16
"""How many neighbours one bucket of the next level stands for."""
LEVELS = 5
POINT = np.dtype([("step", "<i8"), ("value", "<f8"), ("time", "<f8")])
BUCKET = np.dtype(
    [
        *(("first_step", "<i8"), ("first", "<f8"), ("low_step", "<i8"), ("low", "<f8")),
        *(("high_step", "<i8"), ("high", "<f8"), ("last_step", "<i8"), ("last", "<f8")),
        ("time", "<f8"),
    ]
)
"""First, lowest, highest and last of some neighbouring points, and the time of the last."""


def level_path(directory: Path, index: int, level: int) -> Path:
    """Where the points (level 0) or the buckets of a level lie."""
    return directory / (f"{index}.l{level}" if level else f"{index}.pts")


def closed(count: int, level: int) -> int:
    """How many records of a level `count` points fill."""
    return int(count // FAN**level)


def as_buckets(points: Records) -> Records:
    """Every point as a bucket of its own."""
    buckets = np.empty(len(points), BUCKET)
    for name in ("first", "low", "high", "last"):
        buckets[f"{name}_step"] = points["step"]
        buckets[name] = points["value"]
    buckets["time"] = points["time"]
    return buckets


def read_records(directory: Path, index: int, level: int, start: int, stop: int) -> Records:
    """Records `start` to `stop` of a level; fewer when the file ends before."""
    kind = BUCKET if level else POINT
    if stop <= start:
        return np.empty(0, kind)
    with level_path(directory, index, level).open("rb", buffering=0) as file:
        file.seek(start * kind.itemsize)
        # One read of a regular file gives everything up to its end.
        data = file.read((stop - start) * kind.itemsize) or b""
    return np.frombuffer(data, kind, count=len(data) // kind.itemsize)
