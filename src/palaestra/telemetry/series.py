"""`Series`: a curve of bounded size for runs of any length.

It keeps at most `capacity` points. When it is full, neighbouring buckets are merged, and the first, last, lowest and
highest point of each bucket remain, so that a spike of one step stays visible. The order of points never changes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from palaestra.errors import ConfigError

_PER_BUCKET = 4


class SeriesPoint(NamedTuple):
    """One value at one step."""

    step: int
    value: float


class Series:
    """At most `capacity` points of a curve; all points until it is full, then evenly decimated."""

    def __init__(self, capacity: int) -> None:
        if capacity < 2 * _PER_BUCKET:
            raise ConfigError("Series.capacity", capacity, "is too small to show a curve", "Give at least 8")
        self._max_buckets = capacity // _PER_BUCKET
        self._bucket_size = _PER_BUCKET
        self._buckets: list[list[SeriesPoint]] = []
        self._last_bucket_count = 0

    def add(self, step: int, value: float) -> None:
        """Append one point. NaN is never the lowest or highest point of a bucket."""
        if not self._buckets or self._last_bucket_count == self._bucket_size:
            self._start_bucket()
        last = self._buckets[-1]
        last.append(SeriesPoint(step, value))
        if len(last) > _PER_BUCKET:
            last[:] = _select_extremes(last)
        self._last_bucket_count += 1

    def points(self) -> list[SeriesPoint]:
        """The remaining points, in their order."""
        return [point for bucket in self._buckets for point in bucket]

    def _start_bucket(self) -> None:
        if len(self._buckets) == self._max_buckets:
            pairs = range(0, len(self._buckets), 2)
            has_unpaired = len(self._buckets) % 2 == 1
            self._buckets = [
                _select_extremes([point for bucket in self._buckets[i : i + 2] for point in bucket]) for i in pairs
            ]
            self._bucket_size *= 2
            if has_unpaired:
                self._last_bucket_count = self._bucket_size // 2
                return
        self._buckets.append([])
        self._last_bucket_count = 0


def _select_extremes(points: list[SeriesPoint]) -> list[SeriesPoint]:
    """The first, lowest, highest and last point, in order; the earliest of equals."""
    numbers = [i for i, point in enumerate(points) if not math.isnan(point.value)]
    keep = {0, len(points) - 1}
    if numbers:
        keep.add(min(numbers, key=lambda i: points[i].value))
        keep.add(max(numbers, key=lambda i: points[i].value))
    return [points[i] for i in sorted(keep)]
