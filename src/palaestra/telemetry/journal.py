"""The journal of one attempt: an append-only file of records, written by one process and followed by any
number.

`Journal` owns the file while it is open: whole lines, each handed to the kernel by one write, so a line
acknowledged by `emit` survives `kill -9` of the writer (and a power cut after `flush(durable=True)`). It
refuses a second writer and never rewrites a byte: a line torn by a crash is ended with a newline and left for
readers to skip. `JournalReader` follows the tail from a cursor that can be saved; it waits for nobody and
locks nothing. The trainer drives the first, the run service and the studio the second.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from palaestra.errors import ConfigError
from palaestra.files.atomic import sync
from palaestra.telemetry.event import Event, Record, decode, encode

__all__ = ["Cursor", "Journal", "JournalReader"]

_BLOCK_BYTES = 1 << 20
_BYTES_PER_READ = 1 << 22


class Journal:
    """The one writer of a journal. Opening an existing file repairs its end and continues its sequence."""

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.time) -> None:
        self._path = Path(path)
        self._clock = clock
        self._torn = False
        self._lock_fd = -1
        self._fd = -1
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock_fd = _locked(self._path)
            self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            _end_torn_line(self._fd)
            self._seq = _last_seq(self._fd)
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
        """Where the records are."""
        return self._path

    @property
    def seq(self) -> int:
        """The number of the last record written; 0 when there is none."""
        return self._seq

    def emit(self, event: Event) -> None:
        """Append one record. When this returns, the line outlives this process."""
        self._append(encode(event, self._seq + 1, self._clock()).encode("ascii") + b"\n", 1)

    def emit_many(self, events: Iterable[Event]) -> None:
        """Append several records under one time, with one write."""
        now = self._clock()
        lines = [encode(event, seq, now) for seq, event in enumerate(events, start=self._seq + 1)]
        if lines:
            self._append("\n".join([*lines, ""]).encode("ascii"), len(lines))

    def flush(self, durable: bool = False) -> None:
        """Nothing is ever held back here; `durable` also waits until the disk has it."""
        self._check_open()
        if durable:
            os.fsync(self._fd)

    def close(self) -> None:
        """Let the next writer in. Harmless when repeated."""
        _open_journals.discard(self)
        fds, self._fd, self._lock_fd = (self._fd, self._lock_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            # One write does it; only a full disk or a huge batch leaves a remainder.
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
    """How far a reader came: which file, how many of its bytes, the number of the last record."""

    inode: int = 0
    offset: int = 0
    seq: int = 0


class JournalReader:
    """Follows a journal that somebody else writes; a file that does not exist yet is simply empty."""

    def __init__(self, path: str | Path, cursor: Cursor | None = None) -> None:
        self._path = Path(path)
        self._cursor = cursor or Cursor()
        self._fd = -1
        self.corrupt_lines = 0
        """Complete lines that held no record: torn by a crash, or damaged."""
        self.first_corrupt = ""
        """Where the first of them begins and why it was refused."""
        self.more = False
        """The last `read` stopped at its limit; there may be more at once."""
        self.restarts = 0
        """How often the file turned out to be another one, or shorter, and was read from its beginning."""

    @property
    def cursor(self) -> Cursor:
        """Where the next `read` begins; give it to another reader to go on from here."""
        return self._cursor

    def read(self, limit: int | None = None) -> list[Record]:
        """The records since the cursor; with a `limit` at most so many, and no more than a few megabytes of them.

        A line still being written is held back. An empty answer means that there is nothing more at the moment.
        """
        records: list[Record] = []
        self.more = False
        if self._fd < 0 and not self._open():
            return records
        self._settle()
        if self._drain(records, limit) and self._replaced():
            # Whatever the writer of the replaced file left unfinished will never be completed.
            self.corrupt_lines += os.fstat(self._fd).st_size > self._cursor.offset
            if self._open():
                self._settle()
                self._drain(records, limit)
        return records

    def follow(self, stop: Callable[[], bool], wait: Callable[[], object]) -> Iterator[Record]:
        """Yield records as they come, `wait` when there is none, end after a last look once `stop` says so.

        With a `threading.Event`: `reader.follow(done.is_set, lambda: done.wait(0.2))`.
        """
        while True:
            last_look = stop()
            records = self.read()
            yield from records
            if last_look:
                return
            if not records:
                wait()

    def close(self) -> None:
        """Release the file. Harmless when repeated; a later `read` opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> bool:
        try:
            fd = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        self.close()
        self._fd = fd
        return True

    def _settle(self) -> None:
        """Keep the cursor if it still points behind a line of this file; else begin at the beginning."""
        facts = os.fstat(self._fd)
        inode, offset, _ = self._cursor
        same = inode == facts.st_ino and offset <= facts.st_size
        # A file rewritten in place, or one that inherited the inode number, seldom ends a line just there.
        if same and (offset == 0 or os.pread(self._fd, 1, offset - 1) == b"\n"):
            return
        if inode:
            self.restarts += 1
        self._cursor = Cursor(inode=facts.st_ino)

    def _replaced(self) -> bool:
        try:
            return os.stat(self._path).st_ino != self._cursor.inode
        except FileNotFoundError:
            return False

    def _drain(self, records: list[Record], limit: int | None) -> bool:
        """Read to the last complete line; False when `limit` stopped it earlier."""
        inode, offset, seq = self._cursor
        room = -1 if limit is None else limit - len(records)
        # Updates of ten thousand metrics take a hundred times the memory of what they are written as.
        last = None if limit is None else offset + _BYTES_PER_READ
        begun: list[bytes] = []
        waiting = 0
        while room and (block := os.pread(self._fd, _BLOCK_BYTES, offset + waiting)):
            *lines, rest = block.split(b"\n")
            if lines:
                lines[0] = b"".join([*begun, lines[0]])
                begun, waiting = [], 0
            begun.append(rest)
            waiting += len(rest)
            for line in lines:
                if room == 0:
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
                room = 0 if last is not None and offset >= last else room - 1
        self._cursor = Cursor(inode, offset, seq)
        self.more = room == 0
        return room != 0


def _locked(path: Path) -> int:
    """Take the journal's lock; its file says who holds it, because flock itself does not."""
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
            f"Stop process {holder}, or start a new attempt with a journal of its own",
        ) from None
    except BaseException:
        os.close(fd)
        raise
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
    return fd


def _end_torn_line(fd: int) -> None:
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        os.write(fd, b"\n")


def _last_seq(fd: int) -> int:
    """The number of the last readable record, looked for from the end in growing steps."""
    size = os.fstat(fd).st_size
    span = 1 << 16
    while size:
        start = max(0, size - span)
        lines = os.pread(fd, size - start, start).split(b"\n")
        # Unless it is the file's first, the first line of the span has lost its beginning.
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
    # A forked environment worker would otherwise hold the lock after the trainer has died.
    for journal in list(_open_journals):
        journal.close()


os.register_at_fork(after_in_child=_close_in_child)
