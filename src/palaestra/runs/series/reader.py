"""Reads metrics while they are written.

Trusts the newest commit and nothing beyond it, and holds no descriptor or lock. A directory that is being rebuilt
shows fewer points for a moment, never wrong ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from palaestra.files.run_directory import RunDirectory
from palaestra.runs.series import MetricInfo, MetricPoint
from palaestra.runs.series.files import (
    FANOUT,
    LEVELS,
    Records,
    cover_range,
    points_to_buckets,
    read_last_commit,
    read_records,
    record_count,
    representative_points,
)

_POINTS_PER_BIN = 4
"""First, lowest, highest and last."""


class _Column(NamedTuple):
    number: int
    points: int
    source: str


class SeriesReader:
    """Reads the series directory of one attempt; a missing directory has no metrics."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._version: tuple[int, int, int] | None = None
        self._cached_columns: dict[str, _Column] = {}

    def names(self) -> dict[str, MetricInfo]:
        """Return every metric that has points, in the order of first appearance."""
        return {name: MetricInfo(column.points, column.source) for name, column in self._columns().items()}

    def recent(self, name: str, count: int, before: int | None = None) -> list[MetricPoint]:
        """Return the last points of a metric, oldest first; with `before`, only those before that step."""
        column = self._columns().get(name)
        if column is None or count < 1:
            return []
        stop = column.points if before is None else self._search(column, before)
        return _to_points(self._read(column, 0, max(0, stop - count), stop))

    def first_step(self, name: str) -> int | None:
        """Return the step of the first point; None when there is no point."""
        column = self._columns().get(name)
        if column is None:
            return None
        records = self._read(column, 0, 0, 1)
        return int(records["step"][0]) if len(records) else None

    def count(self, name: str, first: int | None = None, last: int | None = None) -> int:
        """Return the number of points between two steps, both included."""
        column = self._columns().get(name)
        if column is None:
            return 0
        start, stop = self._range(column, first, last)
        return stop - start

    def decimate(
        self, name: str, points: int = 2000, first: int | None = None, last: int | None = None
    ) -> list[MetricPoint]:
        """Return at most `points` points (at least 4) between two steps, both included.

        The range is split into bins; the first, lowest, highest and last point of each bin are returned. A point read
        from a bucket carries the time at which the bucket ended.
        """
        column = self._columns().get(name)
        if column is None:
            return []
        points = max(points, _POINTS_PER_BIN)
        start, stop = self._range(column, first, last)
        if stop - start <= points:
            return _to_points(self._read(column, 0, start, stop))
        bins = points // _POINTS_PER_BIN
        level = 0
        while level < LEVELS and (stop - start) // FANOUT ** (level + 1) >= bins:
            level += 1
        offsets, buckets = [], []
        for part in cover_range(start, stop, level):
            records = self._read(column, *part)
            offsets.append(np.arange(part.start, part.start + len(records)) * FANOUT**part.level)
            buckets.append(records if part.level else points_to_buckets(records))
        merged = np.concatenate(buckets)
        if not len(merged):
            return []
        bin_of_bucket = (np.concatenate(offsets) - start) * bins // (stop - start)
        bin_starts = np.flatnonzero(np.diff(bin_of_bucket, prepend=-1))
        steps, values, times = representative_points(merged, bin_starts)
        return [MetricPoint(*point) for point in zip(steps.tolist(), values.tolist(), times.tolist(), strict=True)]

    def _columns(self) -> dict[str, _Column]:
        path = self._directory / "commits.log"
        try:
            stat = path.stat()
        except FileNotFoundError:
            return {}
        # Commits come at most twice a second, and a chart of many metrics calls this for each of them.
        version = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if version != self._version:
            self._cached_columns = self._read_columns(path)
            self._version = version
        return self._cached_columns

    def _read_columns(self, path: Path) -> dict[str, _Column]:
        commit = read_last_commit(path)
        if commit is None:
            return {}
        try:
            lines = (self._directory / "names.jsonl").read_bytes().split(b"\n")[: len(commit.counts)]
            metrics = [(str(data["name"]), str(data["source"])) for data in map(json.loads, lines)]
        except (OSError, KeyError, TypeError, ValueError):
            return {}
        return {
            name: _Column(index, count, source)
            for index, ((name, source), count) in enumerate(zip(metrics, commit.counts, strict=False))
            if count
        }

    def _range(self, column: _Column, first: int | None, last: int | None) -> tuple[int, int]:
        start = 0 if first is None else self._search(column, first)
        stop = column.points if last is None else self._search(column, last + 1)
        return start, max(start, stop)

    def _search(self, column: _Column, step: int) -> int:
        """Return the number of points before the first one at or beyond `step`.

        Exact while steps never decrease; otherwise the greatest step so far decides.
        """
        level, start, stop = LEVELS, 0, record_count(column.points, LEVELS)
        while True:
            records = self._read(column, level, start, stop)
            steps = np.maximum.accumulate(records["last_step" if level else "step"])
            index = start + int(np.searchsorted(steps, step))
            if level == 0:
                return index
            # Continue inside the bucket that reaches the step, or among the points that have no bucket yet.
            level -= 1
            start, stop = index * FANOUT, min((index + 1) * FANOUT, record_count(column.points, level))

    def _read(self, column: _Column, level: int, start: int, stop: int) -> Records:
        try:
            return read_records(self._directory, column.number, level, start, stop)
        except FileNotFoundError:
            # Removed since the commit was read: the series is being rebuilt.
            return read_records(self._directory, column.number, level, 0, 0)


def _to_points(records: Records) -> list[MetricPoint]:
    return [MetricPoint(*record) for record in records.tolist()]


class RunSeries:
    """Reads the metrics of a run: those of its attempts, one after the other.

    An attempt that resumed from a checkpoint repeats steps of the attempt before it. The later attempt wins: for each
    metric it hides the earlier points from its own first step on.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._readers = [SeriesReader(attempt.series) for attempt in run.attempts()]

    def names(self) -> dict[str, MetricInfo]:
        """Return the metrics of all attempts with their total number of points, hidden ones included."""
        metrics: dict[str, MetricInfo] = {}
        for reader in self._readers:
            for name, info in reader.names().items():
                earlier = metrics[name].points if name in metrics else 0
                metrics[name] = MetricInfo(earlier + info.points, info.source)
        return metrics

    def recent(self, name: str, count: int, before: int | None = None) -> list[MetricPoint]:
        """Return the last points of a metric, oldest first; with `before`, only those before that step."""
        points: list[MetricPoint] = []
        for reader, hidden_from in reversed(self._visible(name)):
            ends = [end for end in (before, hidden_from) if end is not None]
            points = reader.recent(name, count - len(points), min(ends, default=None)) + points
        return points

    def decimate(
        self, name: str, points: int = 2000, first: int | None = None, last: int | None = None
    ) -> list[MetricPoint]:
        """Return at most `points` points (at least 4 per attempt) between two steps; see `SeriesReader.decimate`."""
        parts = []
        for reader, hidden_from in self._visible(name):
            ends = [end for end in (last, None if hidden_from is None else hidden_from - 1) if end is not None]
            stop = min(ends, default=None)
            parts.append((reader, stop, reader.count(name, first, stop)))
        total = sum(count for _, _, count in parts)
        # Each attempt gets the minimum first, so that the sum of the shares does not exceed `points`.
        spare = max(0, points - _POINTS_PER_BIN * len(parts))
        result: list[MetricPoint] = []
        for reader, stop, count in parts:
            if count:
                share = points if total <= points else _POINTS_PER_BIN + spare * count // total
                result += reader.decimate(name, share, first, stop)
        return result

    def _visible(self, name: str) -> list[tuple[SeriesReader, int | None]]:
        """Return every attempt that has the metric, with the step from which a later attempt hides it."""
        hidden_from: int | None = None
        visible: list[tuple[SeriesReader, int | None]] = []
        for reader in reversed(self._readers):
            first_step = reader.first_step(name)
            if first_step is not None:
                visible.append((reader, hidden_from))
                hidden_from = first_step if hidden_from is None else min(first_step, hidden_from)
        return visible[::-1]
