"""Writes the records of a journal as points, exactly once.

Owns the files of one `series/` directory while it is open, and keeps no descriptor between flushes. Data without a
commit is truncated. A directory that is shorter than its commit, or that was not synced before a reboot, is emptied;
`cursor` then points to the beginning of the journal.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from palaestra.files.atomic import sync_files
from palaestra.processes.procfs import boot_id
from palaestra.runs.series.files import (
    BUCKET,
    FANOUT,
    LEVELS,
    POINT,
    Commit,
    Records,
    append_commit,
    build_next_level,
    level_path,
    points_to_buckets,
    read_last_commit,
    read_records,
    record_count,
)
from palaestra.runs.wire import JsonObject
from palaestra.telemetry.event import EpisodeSummary, Event, Record, TrainingStep, UnknownEvent
from palaestra.telemetry.journal import Cursor

MAX_METRICS = 2_000
_STEP_LIMIT = 2**63


def read_metrics(event: Event | UnknownEvent) -> tuple[int, Mapping[str, float]] | None:
    """The step and the metrics of an event; None if it has none, or if its step does not fit into 64 bits."""
    if type(event) is TrainingStep:
        metrics = event.metrics
    elif type(event) is EpisodeSummary:
        metrics = {"episode/return": event.episode_return, "episode/length": float(event.length)}
    else:
        return None
    return (event.env_step, metrics) if -_STEP_LIMIT <= event.env_step < _STEP_LIMIT else None


class _Column:
    """One metric: its unwritten points, and the records of every level that no bucket covers yet."""

    def __init__(self, directory: Path, index: int, count: int) -> None:
        self._directory = directory
        self._index = index
        self.count = count
        self.waiting: list[tuple[int, float, float]] = []
        self._uncovered: list[Records] = []

    def write(self) -> list[Path]:
        """Append the waiting points and return the files that grew."""
        points = np.array(self.waiting, POINT)
        if not self._uncovered:
            self._uncovered = [self._read_uncovered(level) for level in range(LEVELS)]
        grown = [self._append(0, points)]
        new = points_to_buckets(points)
        for level in range(LEVELS):
            pending = _concatenate(self._uncovered[level], new)
            if len(pending) < FANOUT:
                self._uncovered[level] = pending
                break
            new = build_next_level(pending)
            # A copy, because a view would keep the whole array in memory.
            self._uncovered[level] = pending[len(new) * FANOUT :].copy()
            grown.append(self._append(level + 1, new))
        self.count += len(points)
        self.waiting = []
        return grown

    def _read_uncovered(self, level: int) -> Records:
        stop = record_count(self.count, level)
        start = record_count(self.count, level + 1) * FANOUT
        if start == stop:
            return np.empty(0, BUCKET)
        records = read_records(self._directory, self._index, level, start, stop)
        return records if level else points_to_buckets(records)

    def _append(self, level: int, records: Records) -> Path:
        path = level_path(self._directory, self._index, level)
        _append(path, records.tobytes())
        return path


class SeriesWriter:
    """The only writer of a series directory."""

    def __init__(self, directory: Path, provenance: Callable[[str], str] = lambda _: "journal") -> None:
        self._directory = directory
        self._provenance = provenance
        self._boot_id = boot_id()
        self._unsynced: set[Path] = set()
        self._columns: dict[str, _Column] = {}
        self._new_names: list[str] = []
        """Lines of names.jsonl that the next flush writes."""
        self.waiting = 0
        """Points that are not flushed yet."""
        self.left_out = 0
        """Points of metrics beyond `MAX_METRICS`, and of steps outside the 64-bit range."""
        self.cursor = Cursor()
        """Position in the journal up to which records were committed."""
        self.tally: JsonObject = {}
        """Counters given to the last flush."""
        if not self._recover():
            shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def points(self) -> int:
        """Number of points on disk."""
        return sum(column.count for column in self._columns.values())

    @property
    def columns(self) -> int:
        """Number of metrics."""
        return len(self._columns)

    def add(self, records: Iterable[Record]) -> None:
        """Queue the metrics of records; `flush` writes them."""
        columns = self._columns
        for _, time, event in records:
            measured = read_metrics(event)
            if measured is None:
                self.left_out += _count_metrics(event)
                continue
            step, metrics = measured
            for name, value in metrics.items():
                column = columns.get(name) or self._add_column(name)
                if column is not None:
                    column.waiting.append((step, value, time))
                    self.waiting += 1

    def flush(self, cursor: Cursor, tally: JsonObject, *, durable: bool = False) -> None:
        """Write the waiting points and commit them. After an `OSError`, discard this writer and open a new one."""
        if cursor == self.cursor and not durable and not self.waiting:
            return
        if self._new_names:
            _append(self._directory / "names.jsonl", "".join(self._new_names).encode())
            self._new_names.clear()
        for column in self._columns.values():
            if column.waiting:
                self._unsynced.update(column.write())
        self.waiting = 0
        if durable:
            sync_files([*self._unsynced, self._directory / "names.jsonl"], self._directory)
            self._unsynced.clear()
        counts = tuple(column.count for column in self._columns.values())
        commit = Commit(cursor, counts, tally, self._boot_id, durable)
        append_commit(self._directory / "commits.log", commit, durable=durable)
        self.cursor, self.tally = cursor, tally

    def _add_column(self, name: str) -> _Column | None:
        index = len(self._columns)
        if index >= MAX_METRICS:
            self.left_out += 1
            return None
        self._new_names.append(json.dumps({"i": index, "name": name, "source": self._provenance(name)}) + "\n")
        column = self._columns[name] = _Column(self._directory, index, 0)
        return column

    def _recover(self) -> bool:
        """Truncate the files to the last commit; return False when they cannot be trusted."""
        commit = read_last_commit(self._directory / "commits.log")
        if commit is None or not (commit.whole or commit.boot_id == self._boot_id):
            return False
        names = _recover_names(self._directory / "names.jsonl", len(commit.counts))
        if names is None or not all(
            _truncate(level_path(self._directory, index, level), record_count(count, level), BUCKET if level else POINT)
            for index, count in enumerate(commit.counts)
            for level in range(LEVELS + 1)
        ):
            return False
        for path in self._directory.glob("[0-9]*.*"):
            if int(path.name.partition(".")[0]) >= len(commit.counts):
                path.unlink()
        for index, (name, count) in enumerate(zip(names, commit.counts, strict=True)):
            self._columns[name] = _Column(self._directory, index, count)
        self.cursor, self.tally = commit.cursor, commit.tally
        return True


def _count_metrics(event: Event | UnknownEvent) -> int:
    if type(event) is TrainingStep:
        return len(event.metrics)
    return 2 if type(event) is EpisodeSummary else 0


def _concatenate(first: Records, second: Records) -> Records:
    # `np.concatenate` compares all fields of the two dtypes first, which takes longer than copying the records.
    joined = np.empty(len(first) + len(second), BUCKET)
    joined[: len(first)], joined[len(first) :] = first, second
    return joined


def _recover_names(path: Path, count: int) -> list[str] | None:
    """Return the first names of the file and truncate it behind them; None when there are fewer."""
    try:
        lines = path.read_bytes().split(b"\n")[:count]
    except FileNotFoundError:
        return None if count else []
    try:
        names = [str(json.loads(line)["name"]) for line in lines]
    except (KeyError, TypeError, ValueError):
        return None
    if len(set(names)) != count:
        return None
    os.truncate(path, sum(len(line) + 1 for line in lines))
    return names


def _truncate(path: Path, count: int, dtype: np.dtype[Any]) -> bool:
    """Truncate a file to `count` records; return False when it has fewer."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return count == 0
    expected = count * dtype.itemsize
    if size > expected:
        os.truncate(path, expected)
    return size >= expected


def _append(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)
