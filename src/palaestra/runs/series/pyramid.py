"""What remains of many points on a chart: the first, lowest, highest and last of each stretch, at every scale.

Pure. A NaN is shown where it is a stretch's first or last and is never an extreme; of equals the earliest counts.
So a spike of one step is still there after ten million.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from palaestra.runs.series.points import BUCKET, FAN, Records

__all__ = ["Piece", "cover", "fanned", "merged", "telling"]

Indices = npt.NDArray[np.intp]


class Piece(NamedTuple):
    """Records `start` to `stop` of one level."""

    level: int
    start: int
    stop: int


def cover(first: int, stop: int, level: int) -> list[Piece]:
    """The points `first` to `stop`, in order, as few records of at most `level` as possible."""
    if first >= stop:
        return []
    if level == 0:
        return [Piece(0, first, stop)]
    size = FAN**level
    inner_first, inner_stop = -(-first // size), stop // size
    if inner_first >= inner_stop:
        return cover(first, stop, level - 1)
    return [
        *cover(first, inner_first * size, level - 1),
        Piece(level, inner_first, inner_stop),
        *cover(inner_stop * size, stop, level - 1),
    ]


def merged(buckets: Records, starts: Indices) -> Records:
    """One bucket for each stretch; stretch i begins at `starts[i]` and ends where the next begins."""
    out = np.empty(len(starts), BUCKET)
    if not len(starts):
        return out
    lows, highs, lasts = _extremes(buckets, starts)
    for name, at in (("first", starts), ("low", lows), ("high", highs), ("last", lasts)):
        out[f"{name}_step"] = buckets[f"{name}_step"][at]
        out[name] = buckets[name][at]
    out["time"] = buckets["time"][lasts]
    return out


def fanned(buckets: Records) -> Records:
    """The buckets of the next level; as many as are full."""
    full = len(buckets) // FAN
    return merged(buckets[: full * FAN], np.arange(0, full * FAN, FAN))


def telling(
    buckets: Records, starts: Indices
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Steps, values and times of at most four points of each stretch, in their order."""
    lows, highs, lasts = _extremes(buckets, starts)
    # Two extremes of one bucket come in the order of their steps; which came first is not known otherwise.
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


def _extremes(buckets: Records, starts: Indices) -> tuple[Indices, Indices, Indices]:
    """Where in `buckets` each stretch has its lowest, its highest and its last."""
    stops = np.append(starts[1:], len(buckets))
    lengths = stops - starts
    return (
        _lowest(buckets["low"], starts, lengths),
        _lowest(-buckets["high"], starts, lengths),
        stops - 1,
    )


def _lowest(values: npt.NDArray[np.float64], starts: Indices, lengths: Indices) -> Indices:
    best = np.minimum.reduceat(np.where(np.isnan(values), np.inf, values), starts)
    nowhere = len(values)
    places = np.where(values == np.repeat(best, lengths), np.arange(nowhere), nowhere)
    found = np.minimum.reduceat(places, starts)
    # Nothing but NaN in the stretch: its first stands for it.
    return np.where(found == nowhere, starts, found)
