"""Records of a journal become points on disk, exactly once.

Owns the files of one `series/` directory while it is open, and keeps no descriptor between two flushes. Whatever it
finds there that no commit vouches for is cut off; a directory that is shorter than its commit says, or that another
boot left unsynced, is emptied, and `cursor` then says to read the journal from its beginning.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from palaestra.files.atomic import sync_files
from palaestra.processes.procfs import boot_id
from palaestra.runs.series.commits import Commit, CommitLog, last_commit
from palaestra.runs.series.points import (
    BUCKET,
    FAN,
    LEVELS,
    POINT,
    Records,
    as_buckets,
    closed,
    level_path,
    read_records,
)
from palaestra.runs.series.pyramid import fanned
from palaestra.telemetry.event import EpisodeSummary, Record, TrainingStep
from palaestra.telemetry.journal import Cursor

__all__ = ["MOST_NAMES", "SeriesWriter"]

MOST_NAMES = 2_000
_LARGEST_STEP = 2**63


class _Column:
    """One metric: what waits to be written, and the unfinished end of every level."""

    def __init__(self, directory: Path, index: int, count: int) -> None:
        self._directory = directory
        self._index = index
        self.count = count
        self.waiting: list[tuple[int, float, float]] = []
        self._ends: list[Records] = []

    def write(self) -> list[Path]:
        """Append what waits; the files that grew."""
        points = np.array(self.waiting, POINT)
        if not self._ends:
            self._ends = [self._end(level) for level in range(LEVELS)]
        grown = [self._append(0, points)]
        new = as_buckets(points)
        for level in range(LEVELS):
            pending = _concatenate(self._ends[level], new)
            if len(pending) < FAN:
                self._ends[level] = pending
                break
            new = fanned(pending)
            # A copy: a view would keep all of it in memory.
            self._ends[level] = pending[len(new) * FAN :].copy()
            grown.append(self._append(level + 1, new))
        self.count += len(points)
        self.waiting = []
        return grown

    def _end(self, level: int) -> Records:
        """The records of a level that no bucket above stands for yet."""
        full = closed(self.count, level)
        start = closed(self.count, level + 1) * FAN
        if start == full:
            return np.empty(0, BUCKET)
        found = read_records(self._directory, self._index, level, start, full)
        return found if level else as_buckets(found)

    def _append(self, level: int, records: Records) -> Path:
        path = level_path(self._directory, self._index, level)
        _append(path, records.tobytes())
        return path


class SeriesWriter:
    """The one writer of a series directory."""

    def __init__(self, directory: Path, provenance: Callable[[str], str] = lambda _: "journal") -> None:
        self._directory = directory
        self._provenance = provenance
        self._log = CommitLog(directory / "commits.log")
        self._boot = boot_id()
        self._unsynced: set[Path] = set()
        self._columns: dict[str, _Column] = {}
        self._new_names: list[str] = []
        """Lines of names.jsonl that the next flush writes."""
        self.waiting = 0
        """Points that no flush has taken yet."""
        self.left_out = 0
        """Points of metrics beyond the first 2,000, and of steps that no number of 64 bits holds."""
        self.cursor = Cursor()
        """Where the journal is to be read on."""
        self.tally: dict[str, Any] = {}
        """As it was given to the last flush."""
        if not self._recover():
            shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def points(self) -> int:
        """How many points are on disk."""
        return sum(column.count for column in self._columns.values())

    @property
    def columns(self) -> int:
        """How many metrics have points."""
        return len(self._columns)

    def add(self, records: Iterable[Record]) -> None:
        """Take the numbers out of records; nothing is on disk before `flush`."""
        columns = self._columns
        for _, time, event in records:
            if type(event) is TrainingStep:
                numbers = event.metrics
            elif type(event) is EpisodeSummary:
                numbers = {"episode/return": event.episode_return, "episode/length": float(event.length)}
            else:
                continue
            step = event.env_step
            if not -_LARGEST_STEP <= step < _LARGEST_STEP:
                self.left_out += len(numbers)
                continue
            for name, value in numbers.items():
                column = columns.get(name) or self._begin(name)
                if column is not None:
                    column.waiting.append((step, value, time))
                    self.waiting += 1

    def flush(self, cursor: Cursor, tally: dict[str, Any], *, durable: bool = False) -> None:
        """Put everything on disk and make it count. After an `OSError` only a new writer knows what is there."""
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
        self._log.append(Commit(cursor, counts, tally, self._boot, durable), durable=durable)
        self.cursor, self.tally = cursor, tally

    def _begin(self, name: str) -> _Column | None:
        if len(self._columns) >= MOST_NAMES:
            self.left_out += 1
            return None
        index = len(self._columns)
        self._new_names.append(json.dumps({"i": index, "name": name, "source": self._provenance(name)}) + "\n")
        column = self._columns[name] = _Column(self._directory, index, 0)
        return column

    def _recover(self) -> bool:
        """Cut everything back to the last commit; False when there is nothing that could be trusted."""
        commit = last_commit(self._directory / "commits.log")
        if commit is None or not (commit.whole or commit.boot_id == self._boot):
            return False
        names = _names(self._directory / "names.jsonl", len(commit.counts))
        if names is None or not all(
            _cut(level_path(self._directory, index, level), closed(count, level), BUCKET if level else POINT)
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


def _concatenate(first: Records, second: Records) -> Records:
    # `np.concatenate` compares all fields of the two kinds first, which takes longer than copying the records.
    joined = np.empty(len(first) + len(second), BUCKET)
    joined[: len(first)], joined[len(first) :] = first, second
    return joined


def _names(path: Path, count: int) -> list[str] | None:
    """The first names of the file, which is cut off behind them; None when there are fewer."""
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


def _cut(path: Path, count: int, kind: np.dtype[Any]) -> bool:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return count == 0
    wanted = count * kind.itemsize
    if size > wanted:
        os.truncate(path, wanted)
    return size >= wanted


def _append(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)
