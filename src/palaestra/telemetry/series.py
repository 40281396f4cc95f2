"""A curve of bounded size, however long the run.

`Series` takes (step, value) points as they come and keeps at most `capacity` of them. Full, it merges
neighbouring buckets two by two, and of each bucket the first, last, lowest and highest point remain, so a
spike of one step is still on a chart after ten million. It refuses nothing but a capacity below 8 and never
reorders. The studio's charts and the progress display drive it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from palaestra.errors import ConfigError

__all__ = ["Point", "Series"]

_PER_BUCKET = 4


class Point(NamedTuple):
    """One value at one step."""

    step: int
    value: float


class Series:
    """At most `capacity` points of a curve; exact until it is full, then thinned evenly."""

    def __init__(self, capacity: int) -> None:
        if capacity < 2 * _PER_BUCKET:
            raise ConfigError("Series.capacity", capacity, "is too small to show a curve", "Give at least 8")
        self.capacity = capacity
        self._most_buckets = capacity // _PER_BUCKET
        self._bucket_size = _PER_BUCKET
        self._buckets: list[list[Point]] = []
        self._in_last = 0
        self.seen = 0
        """How many points were ever added."""

    def add(self, step: int, value: float) -> None:
        """Append one point. A NaN is shown where it is a bucket's first or last, and is never an extreme."""
        if not self._buckets or self._in_last == self._bucket_size:
            self._start_bucket()
        last = self._buckets[-1]
        last.append(Point(step, value))
        if len(last) > _PER_BUCKET:
            last[:] = _telling(last)
        self._in_last += 1
        self.seen += 1

    def extend(self, points: Iterable[tuple[int, float]]) -> None:
        """Append points in their order."""
        for step, value in points:
            self.add(step, value)

    def points(self) -> list[Point]:
        """What is kept, in the order it came."""
        return [point for bucket in self._buckets for point in bucket]

    def __len__(self) -> int:
        return sum(map(len, self._buckets))

    def _start_bucket(self) -> None:
        if len(self._buckets) == self._most_buckets:
            pairs = range(0, len(self._buckets), 2)
            odd_one_left = len(self._buckets) % 2 == 1
            self._buckets = [
                _telling([point for bucket in self._buckets[i : i + 2] for point in bucket]) for i in pairs
            ]
            self._bucket_size *= 2
            if odd_one_left:
                self._in_last = self._bucket_size // 2
                return
        self._buckets.append([])
        self._in_last = 0


def _telling(points: list[Point]) -> list[Point]:
    """First, lowest, highest and last, in order; the earliest of equals."""
    numbers = [i for i, point in enumerate(points) if not math.isnan(point.value)]
    keep = {0, len(points) - 1}
    if numbers:
        keep.add(min(numbers, key=lambda i: points[i].value))
        keep.add(max(numbers, key=lambda i: points[i].value))
    return [points[i] for i in sorted(keep)]
