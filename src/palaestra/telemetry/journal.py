"""The journal of one attempt: an append-only file of records with one writer and any number of readers.

`Journal` writes whole lines, each with one system call, so a line survives `kill -9` of the writer when `emit` returns
(and a power failure after `flush(durable=True)`). It refuses a second writer and never rewrites a byte: a line torn by
a crash is ended with a newline, and readers skip it. `JournalReader` follows the file from a cursor that can be saved;
it takes no lock.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from palaestra.errors import ConfigError
from palaestra.files.atomic import sync
from palaestra.telemetry.event import Event, Record, decode, encode

_BLOCK_BYTES = 1 << 20
_BYTES_PER_READ = 1 << 22


class Journal:
    """The only writer of a journal. Opening an existing file repairs its end and continues its sequence numbers."""

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.time) -> None:
        self._path = Path(path)
        self._clock = clock
        self._torn = False
        self._lock_fd = -1
        self._fd = -1
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock_fd = _take_lock(self._path)
            self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            _terminate_torn_line(self._fd)
            self._seq = _find_last_seq(self._fd)
            with suppress(OSError):
                sync(self._path.parent)
        except OSError as error:
            self.close()
            remedy = "Choose a directory that can be written"
            raise ConfigError("journal", str(path), f"cannot be opened: {error}", remedy) from error
        except BaseException:
            self.close()
            raise
        _open_journals.add(self)

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._path

    @property
    def seq(self) -> int:
        """Number of the last record; 0 if there is none."""
        return self._seq

    def emit(self, event: Event) -> None:
        """Append one record. When this returns, the line survives a crash of this process."""
        self._append(encode(event, self._seq + 1, self._clock()).encode("ascii") + b"\n", 1)

    def emit_many(self, events: Iterable[Event]) -> None:
        """Append several records with the same time, with one write."""
        now = self._clock()
        lines = [encode(event, seq, now) for seq, event in enumerate(events, start=self._seq + 1)]
        if lines:
            self._append("\n".join([*lines, ""]).encode("ascii"), len(lines))

    def flush(self, durable: bool = False) -> None:
        """Check that the journal is open; with `durable`, wait until all data is on disk."""
        self._check_open()
        if durable:
            os.fsync(self._fd)

    def close(self) -> None:
        """Release the file and its lock. May be called more than once."""
        _open_journals.discard(self)
        fds, self._fd, self._lock_fd = (self._fd, self._lock_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._fd < 0:
            raise ValueError(f"the journal {self._path} is closed (in a forked child it always is)")

    def _append(self, data: bytes, count: int) -> None:
        self._check_open()
        if self._torn:
            data = b"\n" + data
        written = 0
        try:
            # Usually one write; a full disk or a huge batch leaves a remainder.
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError:
            if written:
                self._torn = data[written - 1 : written] != b"\n"
                self._seq += data[:written].count(b"\n") - (data[:1] == b"\n")
            raise
        self._torn = False
        self._seq += count


class Cursor(NamedTuple):
    """The position of a reader: file, byte offset and number of the last record."""

    inode: int = 0
    offset: int = 0
    seq: int = 0


class JournalReader:
    """Follows a journal that another process writes. A missing file counts as empty."""

    def __init__(self, path: str | Path, cursor: Cursor | None = None) -> None:
        self._path = Path(path)
        self._cursor = cursor or Cursor()
        self._fd = -1
        self.corrupt_lines = 0
        """Number of complete lines without a record, torn by a crash or damaged."""
        self.first_corrupt = ""
        """Position and error of the first of them."""
        self.more = False
        """Whether the last `read` stopped at its limit, so that more may be available at once."""
        self.restarts = 0
        """How often the file was replaced or truncated, and therefore read from its beginning."""

    @property
    def cursor(self) -> Cursor:
        """The position of the next `read`; another reader can continue from it."""
        return self._cursor

    def read(self, limit: int | None = None) -> list[Record]:
        """The records since the cursor; with a `limit`, at most that many and at most a few megabytes.

        An incomplete last line is left for the next call. An empty list means that there is no new record.
        """
        records: list[Record] = []
        self.more = False
        if self._fd < 0 and not self._open():
            return records
        self._validate_cursor()
        if self._read_lines(records, limit) and self._is_replaced():
            # An incomplete line of the replaced file will never be completed.
            self.corrupt_lines += os.fstat(self._fd).st_size > self._cursor.offset
            if self._open():
                self._validate_cursor()
                self._read_lines(records, limit)
        return records

    def follow(self, stop: Callable[[], bool], wait: Callable[[], object]) -> Iterator[Record]:
        """Yield new records; call `wait` if there is none; return after one last read when `stop` is true.

        With a `threading.Event`: `reader.follow(done.is_set, lambda: done.wait(0.2))`.
        """
        while True:
            is_last_read = stop()
            records = self.read()
            yield from records
            if is_last_read:
                return
            if not records:
                wait()

    def close(self) -> None:
        """Close the file. May be called more than once; a later `read` opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _open(self) -> bool:
        try:
            fd = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        self.close()
        self._fd = fd
        return True

    def _validate_cursor(self) -> None:
        """Keep the cursor if it points to the end of a line of this file; otherwise reset it to the beginning."""
        facts = os.fstat(self._fd)
        inode, offset, _ = self._cursor
        is_same_file = inode == facts.st_ino and offset <= facts.st_size
        # A rewritten file, or another one with the same inode number, rarely ends a line at this offset.
        if is_same_file and (offset == 0 or os.pread(self._fd, 1, offset - 1) == b"\n"):
            return
        if inode:
            self.restarts += 1
        self._cursor = Cursor(inode=facts.st_ino)

    def _is_replaced(self) -> bool:
        try:
            return os.stat(self._path).st_ino != self._cursor.inode
        except FileNotFoundError:
            return False

    def _read_lines(self, records: list[Record], limit: int | None) -> bool:
        """Read up to the last complete line; False if `limit` stopped it earlier."""
        inode, offset, seq = self._cursor
        remaining = -1 if limit is None else limit - len(records)
        # Limited in bytes, too: updates with many metrics take a hundred times their size in memory.
        last = None if limit is None else offset + _BYTES_PER_READ
        partial: list[bytes] = []
        partial_bytes = 0
        while remaining and (block := os.pread(self._fd, _BLOCK_BYTES, offset + partial_bytes)):
            *lines, rest = block.split(b"\n")
            if lines:
                lines[0] = b"".join([*partial, lines[0]])
                partial, partial_bytes = [], 0
            partial.append(rest)
            partial_bytes += len(rest)
            for line in lines:
                if remaining == 0:
                    break
                offset += len(line) + 1
                if not line:
                    continue
                try:
                    record = decode(line)
                except ValueError as error:
                    self.corrupt_lines += 1
                    self.first_corrupt = self.first_corrupt or f"byte {offset - len(line) - 1}: {str(error)[:200]}"
                    continue
                seq = record.seq
                records.append(record)
                remaining = 0 if last is not None and offset >= last else remaining - 1
        self._cursor = Cursor(inode, offset, seq)
        self.more = remaining == 0
        return remaining != 0


def _take_lock(path: Path) -> int:
    """Lock the journal. The lock file holds the process id, because flock does not report it."""
    fd = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise ConfigError(
            "journal",
            str(path),
            f"is being written by process {holder}",
            f"Stop process {holder}, or start a new attempt with another journal",
        ) from None
    except BaseException:
        os.close(fd)
        raise
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
    return fd


def _terminate_torn_line(fd: int) -> None:
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        os.write(fd, b"\n")


def _find_last_seq(fd: int) -> int:
    """The number of the last readable record, searched from the end in growing steps."""
    size = os.fstat(fd).st_size
    span = 1 << 16
    while size:
        start = max(0, size - span)
        lines = os.pread(fd, size - start, start).split(b"\n")
        # Unless the span starts at the file's beginning, its first line is incomplete.
        for line in reversed(lines if start == 0 else lines[1:]):
            try:
                return decode(line).seq
            except ValueError:
                continue
        if start == 0:
            break
        span *= 4
    return 0


_open_journals: weakref.WeakSet[Journal] = weakref.WeakSet()


def _close_in_child() -> None:
    # A forked child would otherwise hold the lock after the trainer has died.
    for journal in list(_open_journals):
        journal.close()


os.register_at_fork(after_in_child=_close_in_child)
