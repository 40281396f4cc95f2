"""The newest records of one run in memory, for clients that follow it; records and the numbers in them are bounded.

One thread publishes; any number look, each with the key of the last record it has. A follower that fell behind is told
so and reads the file, so a slow one never holds memory. Keys are `(attempt, seq)`: ordered, and the same after a
restart.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from palaestra.telemetry.event import Record, TrainingStep

__all__ = ["Key", "Keyed", "Ring"]

Key: TypeAlias = tuple[int, int]


class Keyed(NamedTuple):
    """A record and its place in the run."""

    key: Key
    record: Record


class Ring:
    """The last records of one run: at most `capacity`, and no more than `most_values` numbers in them."""

    def __init__(self, capacity: int = 4096, most_values: int = 131_072) -> None:
        self._capacity, self._most_values = capacity, most_values
        self._kept: deque[Keyed] = deque()
        self._values = 0
        self._before: Key | None = None
        self._lock = threading.Lock()
        self._wakers: dict[object, Callable[[], None]] = {}

    @property
    def newest(self) -> Key | None:
        """The key of the last record; None before the first."""
        with self._lock:
            return self._kept[-1].key if self._kept else None

    def publish(self, attempt: int, records: Sequence[Record]) -> None:
        """Add records in their order and wake every follower once. Those that are here already are left out."""
        with self._lock:
            for record in records:
                key = (attempt, record.seq)
                if self._kept and key <= self._kept[-1].key:
                    continue
                if not self._kept:
                    self._before = (attempt, record.seq - 1)
                self._kept.append(Keyed(key, record))
                self._values += _values(record)
                # The newest stays, however large it is.
                while len(self._kept) > self._capacity or (self._values > self._most_values and len(self._kept) > 1):
                    oldest = self._kept.popleft()
                    self._before = oldest.key
                    self._values -= _values(oldest.record)
            wakers = list(self._wakers.values())
        for wake in wakers:
            wake()

    def since(self, key: Key) -> list[Keyed] | None:
        """The records behind `key`; None when some of them may have fallen out: read the file, then ask again."""
        with self._lock:
            if self._before is None or key < self._before:
                return None
            newer: list[Keyed] = []
            for keyed in reversed(self._kept):
                if keyed.key <= key:
                    break
                newer.append(keyed)
        newer.reverse()
        return newer

    def watch(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Have `wake` called after every publication, by the publishing thread; call the result to end that."""
        token = object()
        with self._lock:
            self._wakers[token] = wake

        def end() -> None:
            with self._lock:
                self._wakers.pop(token, None)

        return end


def _values(record: Record) -> int:
    """How much of memory a record takes, in numbers."""
    event = record.event
    return len(event.metrics) if isinstance(event, TrainingStep) else 1
