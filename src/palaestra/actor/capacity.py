"""How many more episodes may begin: as many as there is room for, and no more than can still be learned from in time.

Whoever begins an episode now is learned from when the learner has taken everything before it. So that its weights are
then at most `max_staleness` updates old, no more may be under way or waiting than `max_staleness + 1` batches beyond
what the learner has taken. An episode that takes much longer than its neighbours can still come too late; the learner
drops it and counts it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Capacity"]


@dataclass(frozen=True)
class Capacity:
    """What bounds the number of running episodes."""

    concurrent: int
    """Episodes at once."""
    batch: int
    """Episodes that an update learns from."""
    max_staleness: int
    """Updates that may happen between an episode's beginning and its being learned from."""

    def free(self, *, running: int, accepted: int, version: int) -> int:
        """How many more may begin.

        `accepted` counts the episodes that are kept for learning since the very first update, those learned from
        included; what was dropped does not count. After a resume it is `accepted_at(version)`, whatever was lost with
        the process: counted from nothing, the pool would begin `version` batches at once, all of them stale.
        """
        in_time = (self.max_staleness + version + 1) * self.batch - (accepted + running)
        return max(0, min(self.concurrent - running, in_time))

    def accepted_at(self, version: int) -> int:
        """How many were accepted when `version` updates were made and nothing waits."""
        return version * self.batch
