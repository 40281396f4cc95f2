"""The files of a series directory: points, buckets at every scale, commits, and the lock of the writer.

Points and buckets are fixed-size little-endian records that are appended and never changed. A bucket keeps the first,
lowest, highest and last of its points, so a spike of one step survives any zoom level. NaN is kept as a first or last
value but is never an extreme. Among equal values the earliest counts.

A flush writes points first and then appends one checksummed line to `commits.log`. After a crash in between, the next
writer truncates the files to the committed counts and continues reading the journal at the committed cursor, so every
record becomes points exactly once.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from palaestra.files.atomic import write_text
from palaestra.files.run_directory import Attempt
from palaestra.runs.wire import JsonObject
from palaestra.telemetry.journal import Cursor

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
_MAX_LOG_BYTES = 256 * 1024
_BLOCK_BYTES = 64 * 1024


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


@dataclass(frozen=True)
class Commit:
    """The journal up to `cursor` is in the series, as the first `counts[i]` points of metric i."""

    cursor: Cursor = field(default_factory=Cursor)
    counts: tuple[int, ...] = ()
    tally: JsonObject = field(default_factory=dict)
    """Other counters of the feed."""
    boot_id: str = ""
    whole: bool = False
    """All data was synced to disk. An unsynced commit is not trusted after a reboot."""


def append_commit(path: Path, commit: Commit, *, durable: bool = False) -> None:
    """Append a commit; a long log, or a durable commit, is replaced by this line alone."""
    body = json.dumps({"schema": 1, **vars(commit), "cursor": list(commit.cursor)}, separators=(",", ":"))
    # The newline in front ends a partial line left by a full disk.
    line = f"\n{zlib.crc32(body.encode()):08x} {body}\n"
    try:
        start_over = durable or path.stat().st_size > _MAX_LOG_BYTES
    except FileNotFoundError:
        start_over = True
    if start_over:
        write_text(path, line, durable=durable)
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        data = line.encode()
        written = os.write(descriptor, data)
        if written != len(data):
            raise OSError(errno.ENOSPC, f"only {written} of {len(data)} bytes fitted", str(path))
    finally:
        os.close(descriptor)


def read_last_commit(path: Path) -> Commit | None:
    """Return the newest commit with a correct checksum; None when there is none."""
    try:
        with path.open("rb", buffering=0) as file:
            commits = (_parse_commit(line) for line, _ in read_lines_backward(file.fileno()))
            return next((commit for commit in commits if commit is not None), None)
    except FileNotFoundError:
        return None


def read_lines_backward(fd: int) -> Iterator[tuple[bytes, int]]:
    """Yield the lines of a file from the end, each with the offset behind it.

    The first is the unterminated rest behind the last newline, often empty.
    """
    end, span = os.fstat(fd).st_size, _BLOCK_BYTES
    is_first = True
    while end:
        start = max(0, end - span)
        span *= 4
        *lines, rest = os.pread(fd, end - start, start).split(b"\n")
        if start and not lines:
            continue
        if is_first:
            yield rest, end
            end -= len(rest)
            is_first = False
        # Unless the block starts the file, its first line lacks its beginning.
        for line in reversed(lines[1:] if start else lines):
            yield line, end
            end -= len(line) + 1
        if not start:
            return


def _parse_commit(line: bytes) -> Commit | None:
    checksum, _, body = line.partition(b" ")
    try:
        if not body or int(checksum, 16) != zlib.crc32(body):
            return None
        data = json.loads(body)
        if data["schema"] != 1:
            return None
        return Commit(Cursor(*data["cursor"]), tuple(data["counts"]), data["tally"], data["boot_id"], data["whole"])
    except (KeyError, TypeError, ValueError):
        return None


class SeriesBusy(OSError):
    """Another process or thread is writing these series."""


class SeriesLock:
    """Exclusive lock for the writer of an attempt's series: a service, or a reader that updates stale series.

    Acquired on construction, which raises `SeriesBusy`, and held until `close` or the end of the process.
    """

    def __init__(self, attempt: Attempt) -> None:
        attempt.path.mkdir(parents=True, exist_ok=True)
        # Outside the series directory, which a writer that cannot trust it removes.
        path = attempt.path / ".series.lock"
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise SeriesBusy(errno.EBUSY, "the series are being written by another process", str(path)) from None

    def close(self) -> None:
        """Release the lock. May be called again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
