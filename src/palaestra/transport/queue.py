"""Rollout segments from a collector to the learner: in order, with backpressure and bounded staleness.

The bound follows from counting. A segment that starts now is learned from after every segment before it, one update
each. If at most `max_staleness` segments are in the ring when it starts, its weights are at most that many updates old
when it is learned from. With `overwrite_oldest` the collector never waits; segments that are too old are dropped and
counted. A failure of the collector ends every wait. The ring owns the memory; the queue only counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from palaestra.errors import CollectorFailed
from palaestra.experience.vla_buffer import VLABuffer


class Claim(NamedTuple):
    """Permission to fill a slot."""

    slot: int
    version: int | None
    """The weights to act with for the whole segment; None: always the newest."""


class TakenSegment(NamedTuple):
    """A segment that the learner is learning from."""

    slot: int
    report: Any
    """The collector's report about it."""
    queue_depth: int
    """Complete segments waiting behind it."""


class SegmentQueue:
    """Queue of segments from one collector to one learner, stored in a ring."""

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
        """Allow `num_segments` segments, with the learner at `version`. Unread segments count and come first."""
        with self.ring.changed:
            for slot, state in enumerate(self.ring.states):
                if state == "reading":  # by a learner that was interrupted
                    self.ring.release(slot)
            self._failure, self._open = None, True
            self._left = num_segments - len(self.ring)
            self._next_update = version + len(self.ring)
            self._first_version = version
            self.ring.changed.notify_all()

    def reopen(self) -> None:
        """Clear a failure and continue."""
        with self.ring.changed:
            self._failure, self._open = None, True
            self.ring.changed.notify_all()

    def close(self) -> None:
        """Allow no further segment, and wake a waiting `claim`."""
        with self.ring.changed:
            self._open = False
            self.ring.changed.notify_all()

    def claim(self, timeout: float | None = None) -> Claim | None:
        """Wait for permission to start a segment; None if closed, or after `timeout` seconds."""
        claimed: list[Claim] = []
        ring = self.ring

        def try_claim() -> bool:
            if not self._open:
                return True
            if self._left <= 0:  # may grow again, if a segment turns out to be too stale
                return False
            if ring.overflow == "block" and ring.num_busy > self._max_staleness:
                return False
            dropped_before = ring.dropped_steps
            slot = ring.claim()
            if slot is None:
                return False
            # An overwritten segment is not learned from, so another one has to replace it.
            self._left += ring.dropped_steps > dropped_before
            exact = max(self._first_version, self._next_update - self._max_staleness) if self._reproducible else None
            self._left -= 1
            self._next_update += 1
            claimed.append(Claim(slot, exact))
            return True

        with ring.changed:
            ring.changed.wait_for(try_claim, timeout)
        return claimed[0] if claimed else None

    def deliver(self, slot: int, report: Any) -> None:
        """Hand over a complete segment."""
        with self.ring.changed:
            self._reports[slot] = report
            self.ring.commit(slot)

    def abandon(self, slot: int, steps: int) -> None:
        """Give up an incomplete segment; its `steps` over all environments count as dropped."""
        with self.ring.changed:
            self._left += 1
            self._next_update -= 1
            self.ring.abandon(slot, steps)

    def fail(self, failure: CollectorFailed) -> None:
        """End collection. Waiting calls return, and `raise_if_failed` raises the first failure."""
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

    def take(self, version: int, timeout: float) -> TakenSegment | None:
        """The oldest segment not too stale for a learner at `version`; None after `timeout` seconds or a failure."""
        with self.ring.changed:
            while self.ring.changed.wait_for(lambda: self._failure or len(self.ring), timeout):
                if self._failure is not None:
                    return None
                slot = self.ring.take()
                assert slot is not None
                report = self._reports.pop(slot)
                if version - int(self.ring.segments[slot].policy_version.min()) <= self._max_staleness:
                    return TakenSegment(slot, report, len(self.ring))
                self._left += 1
                self._next_update -= 1
                self.ring.release(slot, dropped=True)
        return None

    def requeue(self, slot: int, report: Any) -> None:
        """Make a segment that was not learned from the oldest unread one again."""
        with self.ring.changed:
            self._reports[slot] = report
            self.ring.requeue(slot)

    def release(self, slot: int) -> None:
        """Free a segment that was learned from. Publish the resulting weights first."""
        self.ring.release(slot)
