"""Commits of a series directory, and the lock of its writer.

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

from palaestra.files.atomic import write_text
from palaestra.files.run_directory import Attempt
from palaestra.runs.wire import JsonObject
from palaestra.telemetry.journal import Cursor

_MAX_LOG_BYTES = 256 * 1024
_BLOCK_BYTES = 64 * 1024


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
