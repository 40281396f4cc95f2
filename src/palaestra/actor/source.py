"""Where a learner gets its experience from: one interface, whoever collects and wherever.

`take` gives the next whole segment, `give_back` returns its memory and says which weights came of it. `InTurn` collects
when asked; `palaestra.actor.background` collects all the while.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from palaestra.actor.collector import Collector, Episode
from palaestra.experience.buffer import RolloutBuffer

__all__ = ["InTurn", "Segment", "Source"]


@dataclass(frozen=True)
class Segment:
    """A stretch of experience, `[T, N]`, lent to the learner."""

    buffer: RolloutBuffer
    episodes: Sequence[Episode]
    collect_seconds: float
    """How long it took to collect."""
    idle_seconds: float = 0.0
    """How long the collector had waited before it began."""
    slot: int = 0
    queue_depth: int = 0
    """Whole segments that were waiting behind it when it was taken."""
    scale_state: tuple[float, float, float] | None = None
    """The reward scale's mean, variance and count after it."""

    def overlap(self, waited: float, whole: float) -> dict[str, float]:
        """How well collecting and learning kept each other busy, the learner having waited for some of the `whole`."""
        return {
            "queue_depth": float(self.queue_depth),
            "wait_seconds": waited,
            "collector_utilisation": self.collect_seconds / max(self.collect_seconds + self.idle_seconds, 1e-9),
            "learner_utilisation": 1.0 - waited / max(whole, 1e-9),
        }


class Source(Protocol):
    """Gives segments in the order in which they were collected."""

    def take(self) -> Segment:
        """The next segment, when there is one; `CollectorFailed` when there will be none."""

    def give_back(self, segment: Segment, version: int) -> None:
        """The segment was learned from, and the policy is at `version` now."""

    def put_back(self, segment: Segment) -> None:
        """The segment was not learned from after all."""

    def heed(self) -> None:
        """Raise `CollectorFailed` if collection has come to grief; called in the middle of long updates."""

    def metrics(self) -> dict[str, float]:
        """What only this kind of source has to report."""

    def stop(self) -> bool:
        """End collection in bounded time; whether nothing of it is left. Harmless when repeated."""


class InTurn:
    """Collects when asked, in the caller's thread, into one buffer."""

    def __init__(self, collector: Collector, num_steps: int, version: int, buffer: RolloutBuffer | None) -> None:
        self._collector, self._num_steps, self._version = collector, num_steps, version
        self.buffer = buffer

    def take(self) -> Segment:
        """Collect a segment."""
        began = time.perf_counter()
        self.buffer = self._collector.collect(self._num_steps, self.buffer, policy_version=self._version)
        return Segment(self.buffer, self._collector.episodes, time.perf_counter() - began)

    def give_back(self, segment: Segment, version: int) -> None:
        """The next segment overwrites this one."""
        self._version = version

    def put_back(self, segment: Segment) -> None:
        """It is gone: the next one overwrites it."""

    def heed(self) -> None:
        """Nobody else is at work."""

    def metrics(self) -> dict[str, float]:
        """Nothing of its own."""
        return {}

    def stop(self) -> bool:
        """Nothing runs between two calls."""
        return True
