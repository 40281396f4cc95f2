"""Numbers of one attempt, read while somebody else writes them.

Believes the newest commit and nothing behind it; holds no descriptor and no lock. A directory that is being rebuilt
has few points for a moment, never wrong ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from palaestra.runs.series.commits import last_commit
from palaestra.runs.series.metric_point import MetricPoint
from palaestra.runs.series.points import FAN, LEVELS, Records, as_buckets, closed, read_records
from palaestra.runs.series.pyramid import cover, telling

__all__ = ["MetricInfo", "SeriesReader"]

_PER_BIN = 4


class MetricInfo(NamedTuple):
    """One metric of an attempt."""

    points: int
    source: str
    """Where its numbers come from: `journal`, `tensorboard:losses/value_loss`, `stdout:events`."""


class _Column(NamedTuple):
    number: int
    points: int
    source: str


class SeriesReader:
    """Reads one series directory, existing or not."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._version: tuple[int, int, int] | None = None
        self._found: dict[str, _Column] = {}

    def names(self) -> dict[str, MetricInfo]:
        """Every metric that has points, in the order they first came."""
        return {name: MetricInfo(column.points, column.source) for name, column in self._columns().items()}

    def recent(self, name: str, count: int, before: int | None = None) -> list[MetricPoint]:
        """The last points of a metric, oldest first; only those in front of step `before`, if given."""
        column = self._columns().get(name)
        if column is None or count < 1:
            return []
        stop = column.points if before is None else self._search(column, before)
        return _points(self._read(column, 0, max(0, stop - count), stop))

    def first_step(self, name: str) -> int | None:
        """The step of its first point."""
        column = self._columns().get(name)
        if column is None:
            return None
        found = self._read(column, 0, 0, 1)
        return int(found["step"][0]) if len(found) else None

    def count(self, name: str, first: int | None = None, last: int | None = None) -> int:
        """How many points lie between two steps, both included."""
        column = self._columns().get(name)
        if column is None:
            return 0
        start, stop = self._range(column, first, last)
        return stop - start

    def decimated(
        self, name: str, points: int = 2000, first: int | None = None, last: int | None = None
    ) -> list[MetricPoint]:
        """At most `points` points (at least 4) between two steps, both included.

        First, lowest, highest and last of every stretch are among them. A point that stands for a stretch carries the
        time at which its bucket ended.
        """
        column = self._columns().get(name)
        if column is None:
            return []
        points = max(points, _PER_BIN)
        start, stop = self._range(column, first, last)
        if stop - start <= points:
            return _points(self._read(column, 0, start, stop))
        bins = points // _PER_BIN
        level = 0
        while level < LEVELS and (stop - start) // FAN ** (level + 1) >= bins:
            level += 1
        pieces = cover(start, stop, level)
        found = [self._read(column, piece.level, piece.start, piece.stop) for piece in pieces]
        begins = np.concatenate(
            [
                np.arange(piece.start, piece.start + len(got)) * FAN**piece.level
                for piece, got in zip(pieces, found, strict=True)
            ]
        )
        buckets = np.concatenate(
            [got if piece.level else as_buckets(got) for piece, got in zip(pieces, found, strict=True)]
        )
        if not len(buckets):
            return []
        places = (begins - start) * bins // (stop - start)
        starts = np.flatnonzero(np.diff(places, prepend=-1))
        steps, values, times = telling(buckets, starts)
        return [MetricPoint(*point) for point in zip(steps.tolist(), values.tolist(), times.tolist(), strict=True)]

    def _columns(self) -> dict[str, _Column]:
        path = self._directory / "commits.log"
        try:
            facts = path.stat()
        except FileNotFoundError:
            return {}
        # A commit is made twice a second at most, and a chart of many metrics asks for each of them.
        version = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
        if version != self._version:
            self._found = self._read_columns(path)
            self._version = version
        return self._found

    def _read_columns(self, path: Path) -> dict[str, _Column]:
        commit = last_commit(path)
        if commit is None:
            return {}
        lines = _lines(self._directory / "names.jsonl", len(commit.counts))
        return {
            name: _Column(index, count, source)
            for index, ((name, source), count) in enumerate(zip(lines, commit.counts, strict=False))
            if count
        }

    def _range(self, column: _Column, first: int | None, last: int | None) -> tuple[int, int]:
        start = 0 if first is None else self._search(column, first)
        stop = column.points if last is None else self._search(column, last + 1)
        return start, max(start, stop)

    def _search(self, column: _Column, step: int) -> int:
        """The number of points in front of the first that has come to `step`.

        Exact while steps never fall. Where they do, the greatest step so far decides.
        """
        level, start, stop = LEVELS, 0, closed(column.points, LEVELS)
        while True:
            found = self._read(column, level, start, stop)
            steps = np.maximum.accumulate(found["last_step" if level else "step"])
            at = start + int(np.searchsorted(steps, step))
            if level == 0:
                return at
            # Within the bucket that reaches the step; or, when none does, among what no bucket holds yet.
            level -= 1
            start, stop = at * FAN, min((at + 1) * FAN, closed(column.points, level))

    def _read(self, column: _Column, level: int, start: int, stop: int) -> Records:
        try:
            return read_records(self._directory, column.number, level, start, stop)
        except FileNotFoundError:
            # Emptied between the commit and now: the series is being rebuilt.
            return read_records(self._directory, column.number, level, 0, 0)


def _lines(path: Path, count: int) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    try:
        for line in path.read_bytes().split(b"\n")[:count]:
            data = json.loads(line)
            found.append((str(data["name"]), str(data["source"])))
    except (OSError, KeyError, TypeError, ValueError):
        return []
    return found


def _points(records: Records) -> list[MetricPoint]:
    return [MetricPoint(*record) for record in records.tolist()]
