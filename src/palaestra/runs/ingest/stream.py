"""A run as an event stream: first its past run events and telemetry records, then new ones, each once.

`Ring` holds the newest records in memory. One thread publishes; any number of followers read, each described by one
position. Records come from the ring if it reaches back far enough, otherwise from the files, so a slow follower costs
no memory. The stream ends when the run has ended and everything was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from palaestra.errors import ConfigError
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.runs.record import RunEvent
from palaestra.runs.state.event_log import RunEventLog, current_phase
from palaestra.runs.state.unsupervised import read_unsupervised
from palaestra.telemetry.event import Record, TrainingStep
from palaestra.telemetry.journal import JournalReader

_BATCH = 2000
_POLL_EVERY_S = 0.5
"""For changes without a notification."""

Key: TypeAlias = tuple[int, int]
"""Attempt and sequence number: ordered, and stable across restarts."""


class Keyed(NamedTuple):
    """A record and its key."""

    key: Key
    record: Record


class Ring:
    """The last records of one run: at most `capacity` records with at most `max_values` values."""

    def __init__(self, capacity: int = 4096, max_values: int = 131_072) -> None:
        self._capacity, self._max_values = capacity, max_values
        self._records: deque[Keyed] = deque()
        self._values = 0
        self._before: Key | None = None
        self._lock = threading.Lock()
        self._subscribers: dict[object, Callable[[], None]] = {}

    def publish(self, attempt: int, records: Sequence[Record]) -> None:
        """Append records in order and notify every subscriber once. Records that were added before are skipped."""
        with self._lock:
            for record in records:
                key = (attempt, record.seq)
                if self._records and key <= self._records[-1].key:
                    continue
                if not self._records:
                    self._before = (attempt, record.seq - 1)
                self._records.append(Keyed(key, record))
                self._values += _value_count(record)
                # The newest record is kept regardless of its size.
                while len(self._records) > self._capacity or (
                    self._values > self._max_values and len(self._records) > 1
                ):
                    oldest = self._records.popleft()
                    self._before = oldest.key
                    self._values -= _value_count(oldest.record)
            subscribers = list(self._subscribers.values())
        for callback in subscribers:
            callback()

    def since(self, key: Key) -> list[Keyed] | None:
        """Return the records after `key`; None when some of them may have been dropped: read the file first."""
        with self._lock:
            if self._before is None or key < self._before:
                return None
            newer: list[Keyed] = []
            for keyed in reversed(self._records):
                if keyed.key <= key:
                    break
                newer.append(keyed)
        newer.reverse()
        return newer

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have the publishing thread call `callback` after every publication; return a function that unsubscribes."""
        token = object()
        with self._lock:
            self._subscribers[token] = callback

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers.pop(token, None)

        return unsubscribe


def _value_count(record: Record) -> int:
    event = record.event
    return len(event.metrics) if isinstance(event, TrainingStep) else 1


class Position(NamedTuple):
    """How far a follower has read: the last run event, and the last record of an attempt."""

    event: int = 0
    attempt: int = 0
    seq: int = 0

    @classmethod
    def parse(cls, text: str) -> Position:
        """Parse `3.1.4711`; an empty text is the beginning. Raises `ConfigError` for anything else."""
        if not text:
            return cls()
        words = text.split(".")
        if len(words) != 3 or not all(word.isascii() and word.isdecimal() and len(word) < 19 for word in words):
            raise ConfigError("after", text, "is not the id of an event", "Give the id of the last event you have")
        return cls(*map(int, words))

    def __str__(self) -> str:
        return f"{self.event}.{self.attempt}.{self.seq}"


class StreamItem(NamedTuple):
    """A run event or telemetry record, and the position after it."""

    id: str
    item: Record | RunEvent


class _AttemptReader:
    """Reads the records of one attempt after a sequence number, from memory or from the file."""

    def __init__(self, attempt: Attempt, seq: int) -> None:
        self.number, self.seq = attempt.number, seq
        self._file = JournalReader(attempt.journal)

    async def next(self, ring: Ring | None) -> list[Record]:
        recent = ring.since((self.number, self.seq)) if ring is not None else None
        if recent is not None:
            records = [keyed.record for keyed in recent[:_BATCH] if keyed.key[0] == self.number]
        else:
            records = []
            while True:
                block = await asyncio.to_thread(self._file.read, _BATCH)
                records = [record for record in block if record.seq > self.seq]
                if records or not block:
                    break
        if records:
            self.seq = records[-1].seq
        return records

    def close(self) -> None:
        self._file.close()


async def follow(
    run: RunDirectory,
    after: str,
    get_ring: Callable[[], Ring | None],
    subscribe: Callable[[Callable[[], None]], Callable[[], None]],
) -> AsyncGenerator[StreamItem, None]:
    """Yield what follows a position, then new items. `subscribe` registers a callback for run events."""
    position = Position.parse(after)
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    subscriptions = [subscribe(changed.set)]
    ring: Ring | None = None
    readers: dict[int, _AttemptReader] = {}
    try:
        while True:
            changed.clear()
            current = get_ring()
            if current is not None and current is not ring:
                ring = current
                subscriptions.append(ring.subscribe(lambda: notify(loop, changed)))
            # Checked before reading: everything written until then is read below. A run with a ring is supervised and
            # not over even if its log says so, because its row may still be written.
            is_over = current is None and _has_ended(run)
            async for reached, item in _read_new(run, position, ring, readers):
                position = reached
                yield StreamItem(str(position), item)
            if is_over:
                return
            try:
                async with asyncio.timeout(_POLL_EVERY_S):
                    await changed.wait()
            except TimeoutError:
                continue
    finally:
        for unsubscribe in subscriptions:
            unsubscribe()
        for reader in readers.values():
            reader.close()


async def replay(run: RunDirectory, after: str) -> AsyncGenerator[StreamItem, None]:
    """Yield what follows a position so far, from the files alone."""
    readers: dict[int, _AttemptReader] = {}
    try:
        async for position, item in _read_new(run, Position.parse(after), None, readers):
            yield StreamItem(str(position), item)
    finally:
        for reader in readers.values():
            reader.close()


def notify(loop: asyncio.AbstractEventLoop, changed: asyncio.Event) -> None:
    """Set an event of a loop from any thread."""
    # The publishing thread may outlive the loop.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(changed.set)


async def _read_new(
    run: RunDirectory, position: Position, ring: Ring | None, readers: dict[int, _AttemptReader]
) -> AsyncIterator[tuple[Position, Record | RunEvent]]:
    event_seq, attempt, seq = position
    events = RunEventLog(run).read(after=event_seq)
    for paths in run.attempts():
        number = paths.number
        if number < attempt:
            continue
        for event in _pop_before_end(number, events):
            event_seq = event.seq
            yield Position(event_seq, attempt, seq), event
        if number > attempt:
            attempt, seq = number, 0
        reader = readers.setdefault(number, _AttemptReader(paths, seq))
        while records := await reader.next(ring):
            for record in records:
                seq = record.seq
                yield Position(event_seq, attempt, seq), record
    for event in events:
        yield Position(event.seq, attempt, seq), event


def _pop_before_end(number: int, events: list[RunEvent]) -> Iterator[RunEvent]:
    """Remove and yield the events before the end of an attempt, so that its end follows its records."""
    while events:
        first = events[0]
        if first.attempt > number or (first.attempt == number and first.phase.has_ended):
            return
        yield events.pop(0)


def _has_ended(run: RunDirectory) -> bool:
    if run.spec.exists():
        return current_phase(RunEventLog(run).read()).has_ended
    record = read_unsupervised(run)
    return record is None or record.phase.has_ended
