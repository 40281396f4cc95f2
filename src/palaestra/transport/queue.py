"""The arrow from actor to learner: whole segments in order, with backpressure and a bound on their staleness.

The bound follows from counting. A segment that is begun now will be learned from after everything that lies before it,
one update each; so with at most `max_staleness` segments in the ring when it begins, the weights that act are at most
that many updates old when it is learned from. With `overwrite_oldest` nobody waits, and what has become too old is
dropped and counted instead. A failure of the collector ends every wait. Owns the counting, not the memory (that is
the ring's) and not the threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from palaestra.errors import CollectorFailed
from palaestra.experience.vla_buffer import VLABuffer

__all__ = ["Claim", "SegmentQueue", "Taken"]


class Claim(NamedTuple):
    """Leave to fill a slot."""

    slot: int
    version: int | None
    """The weights to act on, all through the segment; None: always the newest."""


class Taken(NamedTuple):
    """A segment that is being learned from."""

    slot: int
    report: Any
    """What the collector said about it."""
    queue_depth: int
    """Whole segments that wait behind it."""


class SegmentQueue:
    """Segments on their way from one collector to one learner, through a ring."""

    def __init__(self, ring: VLABuffer, *, max_staleness: int, reproducible: bool = False) -> None:
        self.ring = ring
        self._max_staleness = max_staleness
        self._reproducible = reproducible
        self._reports: dict[int, Any] = {}
        self._failure: CollectorFailed | None = None
        self._open = False
        self._left = 0
        self._next_update = 0
        self._first_version = 0

    def open(self, version: int, num_segments: int) -> None:
        """Let up to `num_segments` be begun, the learner being at `version`. Unread ones are learned from first."""
        with self.ring.changed:
            for slot, state in enumerate(self.ring.states):
                if state == "reading":  # by a learner that was interrupted, and will not come back
                    self.ring.release(slot)
            self._failure, self._open = None, True
            self._left = num_segments - len(self.ring)
            self._next_update = version + len(self.ring)
            self._first_version = version
            self.ring.changed.notify_all()

    def reopen(self) -> None:
        """Go on after a failure, as if nothing had happened."""
        with self.ring.changed:
            self._failure, self._open = None, True
            self.ring.changed.notify_all()

    def close(self) -> None:
        """Nothing more is to be begun; whoever waits to begin is sent home."""
        with self.ring.changed:
            self._open = False
            self.ring.changed.notify_all()

    def claim(self, timeout: float | None = None) -> Claim | None:
        """Leave to begin a segment; None when closed, or not within `timeout` seconds."""
        claimed: list[Claim] = []
        ring = self.ring

        def settled() -> bool:
            if not self._open:
                return True
            if self._left <= 0:  # more may be wanted yet, when something turns out to be too stale
                return False
            if ring.overflow == "block" and ring.num_busy > self._max_staleness:
                return False
            dropped_before = ring.dropped_steps
            slot = ring.claim()
            if slot is None:
                return False
            # What was overwritten will not be learned from, so another has to be begun in its place.
            self._left += ring.dropped_steps > dropped_before
            exact = max(self._first_version, self._next_update - self._max_staleness) if self._reproducible else None
            self._left -= 1
            self._next_update += 1
            claimed.append(Claim(slot, exact))
            return True

        with ring.changed:
            ring.changed.wait_for(settled, timeout)
        return claimed[0] if claimed else None

    def deliver(self, slot: int, report: Any) -> None:
        """The segment is whole."""
        with self.ring.changed:
            self._reports[slot] = report
            self.ring.commit(slot)

    def abandon(self, slot: int, steps: int) -> None:
        """The segment will not become whole; `steps` of it, over all environments, are counted as dropped."""
        with self.ring.changed:
            self._left += 1
            self._next_update -= 1
            self.ring.abandon(slot, steps)

    def fail(self, failure: CollectorFailed) -> None:
        """Collection is over, and this is why; told to whoever waits for experience."""
        with self.ring.changed:
            if self._failure is None:
                self._failure = failure
            self._open = False
            self.ring.changed.notify_all()

    def raise_if_failed(self) -> None:
        """Raise the failure, if there was one."""
        failure = self._failure
        if failure is not None:
            raise failure

    def take(self, version: int, timeout: float) -> Taken | None:
        """The oldest segment that is not too stale for a learner at `version`; None if none comes in time, or ever."""
        with self.ring.changed:
            while self.ring.changed.wait_for(lambda: self._failure or len(self.ring), timeout):
                if self._failure is not None:
                    return None
                slot = self.ring.take()
                assert slot is not None
                report = self._reports.pop(slot)
                if version - int(self.ring.segments[slot].policy_version.min()) <= self._max_staleness:
                    return Taken(slot, report, len(self.ring))
                self._left += 1
                self._next_update -= 1
                self.ring.release(slot, dropped=True)
        return None

    def requeue(self, slot: int, report: Any) -> None:
        """The segment was not learned from after all: it is the oldest again."""
        with self.ring.changed:
            self._reports[slot] = report
            self.ring.requeue(slot)

    def release(self, slot: int) -> None:
        """The segment was learned from; publish the weights that came of it before saying so."""
        self.ring.release(slot)
