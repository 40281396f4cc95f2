"""The newest records of one run in memory, for clients that follow it. Bounded in records and in values.

One thread publishes; any number of followers read, each with the key of its last record. A follower that fell behind
reads the file instead, so a slow follower costs no memory. Keys are `(attempt, seq)`: ordered, and stable across
restarts.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from palaestra.telemetry.event import Record, TrainingStep

Key: TypeAlias = tuple[int, int]


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
