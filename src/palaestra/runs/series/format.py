"""Points and buckets: their file layout, and how neighbouring points are summarized at every scale.

Files hold fixed-size little-endian records that are appended and never changed. A bucket keeps the first, lowest,
highest and last of its points, so a spike of one step survives any zoom level. NaN is kept as a first or last value but
is never an extreme. Among equal values the earliest counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Records: TypeAlias = npt.NDArray[np.void]
Indices: TypeAlias = npt.NDArray[np.intp]

FANOUT = 16
"""Records of one level per bucket of the next."""
LEVELS = 5
POINT = np.dtype([("step", "<i8"), ("value", "<f8"), ("time", "<f8")])
BUCKET = np.dtype(
    [
        *(("first_step", "<i8"), ("first", "<f8"), ("low_step", "<i8"), ("low", "<f8")),
        *(("high_step", "<i8"), ("high", "<f8"), ("last_step", "<i8"), ("last", "<f8")),
        ("time", "<f8"),
    ]
)
"""First, lowest, highest and last of neighbouring points, and the time of the last."""


def level_path(directory: Path, index: int, level: int) -> Path:
    """Return the file of the points (level 0) or of the buckets of a level."""
    return directory / (f"{index}.l{level}" if level else f"{index}.pts")


def record_count(points: int, level: int) -> int:
    """Return the number of complete records of a level for this many points."""
    return int(points // FANOUT**level)


def read_records(directory: Path, index: int, level: int, start: int, stop: int) -> Records:
    """Read records `start` to `stop` of a level; fewer when the file is shorter."""
    dtype = BUCKET if level else POINT
    if stop <= start:
        return np.empty(0, dtype)
    with level_path(directory, index, level).open("rb", buffering=0) as file:
        file.seek(start * dtype.itemsize)
        # One read of a regular file returns everything up to its end.
        data = file.read((stop - start) * dtype.itemsize) or b""
    return np.frombuffer(data, dtype, count=len(data) // dtype.itemsize)


def points_to_buckets(points: Records) -> Records:
    """Return one bucket per point."""
    buckets = np.empty(len(points), BUCKET)
    for name in ("first", "low", "high", "last"):
        buckets[f"{name}_step"] = points["step"]
        buckets[name] = points["value"]
    buckets["time"] = points["time"]
    return buckets


def build_next_level(buckets: Records) -> Records:
    """Merge groups of `FANOUT` buckets; an incomplete last group is left out."""
    count = len(buckets) // FANOUT * FANOUT
    starts = np.arange(0, count, FANOUT)
    merged = np.empty(len(starts), BUCKET)
    if not len(starts):
        return merged
    buckets = buckets[:count]
    lows, highs, lasts = _find_extremes(buckets, starts)
    for name, at in (("first", starts), ("low", lows), ("high", highs), ("last", lasts)):
        merged[f"{name}_step"] = buckets[f"{name}_step"][at]
        merged[name] = buckets[name][at]
    merged["time"] = buckets["time"][lasts]
    return merged


class LevelRange(NamedTuple):
    """Records `start` to `stop` of one level."""

    level: int
    start: int
    stop: int


def cover_range(first: int, stop: int, level: int) -> list[LevelRange]:
    """Cover the points `first` to `stop`, in order, with as few records of at most `level` as possible."""
    if first >= stop:
        return []
    if level == 0:
        return [LevelRange(0, first, stop)]
    size = FANOUT**level
    inner_first, inner_stop = -(-first // size), stop // size
    if inner_first >= inner_stop:
        return cover_range(first, stop, level - 1)
    return [
        *cover_range(first, inner_first * size, level - 1),
        LevelRange(level, inner_first, inner_stop),
        *cover_range(inner_stop * size, stop, level - 1),
    ]


def representative_points(
    buckets: Records, starts: Indices
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return steps, values and times of at most four points per group, in order; group i begins at `starts[i]`."""
    lows, highs, lasts = _find_extremes(buckets, starts)
    # Two extremes of one bucket are ordered by step; their true order is not stored.
    swap = (highs < lows) | ((highs == lows) & (buckets["high_step"][highs] < buckets["low_step"][lows]))
    columns = (("first", starts), ("low", lows), ("high", highs), ("last", lasts))
    steps = np.stack([buckets[f"{name}_step"][at] for name, at in columns], axis=1)
    values = np.stack([buckets[name][at] for name, at in columns], axis=1)
    times = np.stack([buckets["time"][at] for _, at in columns], axis=1)
    for table in (steps, values, times):
        table[swap, 1], table[swap, 2] = table[swap, 2], table[swap, 1]
    same = (steps[:, 1:] == steps[:, :-1]) & (
        (values[:, 1:] == values[:, :-1]) | (np.isnan(values[:, 1:]) & np.isnan(values[:, :-1]))
    )
    keep = np.ones(steps.shape, bool)
    keep[:, 1:] = ~same
    return steps[keep], values[keep], times[keep]


def _find_extremes(buckets: Records, starts: Indices) -> tuple[Indices, Indices, Indices]:
    """Return the indices of the lowest, highest and last bucket of each group."""
    stops = np.append(starts[1:], len(buckets))
    lengths = stops - starts
    lows = _find_lowest(buckets["low"], starts, lengths)
    highs = _find_lowest(-buckets["high"], starts, lengths)
    return lows, highs, stops - 1


def _find_lowest(values: npt.NDArray[np.float64], starts: Indices, lengths: Indices) -> Indices:
    lowest = np.minimum.reduceat(np.where(np.isnan(values), np.inf, values), starts)
    missing = len(values)
    candidates = np.where(values == np.repeat(lowest, lengths), np.arange(missing), missing)
    indices = np.minimum.reduceat(candidates, starts)
    # A group of NaN only is represented by its first bucket.
    return np.where(indices == missing, starts, indices)
