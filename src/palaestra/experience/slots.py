"""Which parts of a ring are free, being filled, full or being read: the bookkeeping alone, without memory or locks.

A slot goes free -> filling -> full -> reading -> free, or back to free from filling when the filler gives up. `claim`
never hands out a slot that is being read; when nothing is free it answers None (`block`), or takes the oldest full
slot and counts it as dropped (`overwrite_oldest`). Driven by `VLABuffer`, which adds the memory and the waiting.
"""

from __future__ import annotations

import heapq
from collections import deque
from enum import Enum
from typing import Literal, TypeAlias

from palaestra.errors import ExperienceError

__all__ = ["Overflow", "SlotState", "Slots"]

Overflow: TypeAlias = Literal["block", "overwrite_oldest"]
"""What happens when a new segment finds no room: wait for the reader, or lose the oldest unread one (counted)."""


class SlotState(Enum):
    """Where a slot is on its way round."""

    FREE = "free"
    FILLING = "filling"
    FULL = "full"
    READING = "reading"


class Slots:
    """The states of `count` slots and the order in which they were filled."""

    def __init__(self, count: int, overflow: Overflow = "block") -> None:
        self.states = [SlotState.FREE] * count
        self.overflow: Overflow = overflow
        self.overwritten = 0
        self._full: deque[int] = deque()
        self._free = list(range(count))  # a heap: the lowest number is filled first

    @property
    def num_full(self) -> int:
        """How many slots wait to be read."""
        return len(self._full)

    @property
    def num_busy(self) -> int:
        """How many slots are not free."""
        return len(self.states) - len(self._free)

    def claim(self) -> int | None:
        """A slot to fill, or None when the filler has to wait."""
        if self._free:
            slot = heapq.heappop(self._free)
            self.states[slot] = SlotState.FILLING
            return slot
        if self.overflow == "block" or not self._full:
            return None
        slot = self._full.popleft()
        self.overwritten += 1
        self.states[slot] = SlotState.FILLING
        return slot

    def commit(self, slot: int) -> None:
        """The slot is filled and may be read."""
        self._move(slot, SlotState.FILLING, SlotState.FULL)
        self._full.append(slot)

    def abandon(self, slot: int) -> None:
        """What was written so far is worth nothing; the slot is free again."""
        self._move(slot, SlotState.FILLING, SlotState.FREE)

    def oldest(self) -> int | None:
        """The slot that `take` would give, without taking it."""
        return self._full[0] if self._full else None

    def take(self) -> int | None:
        """The slot filled longest ago, now protected until `release`; None when there is none."""
        if not self._full:
            return None
        slot = self._full.popleft()
        self.states[slot] = SlotState.READING
        return slot

    def being_read(self) -> list[int]:
        """The slots that were taken and not given back."""
        return [slot for slot, state in enumerate(self.states) if state is SlotState.READING]

    def release(self, slot: int) -> None:
        """The reader is done with it."""
        self._move(slot, SlotState.READING, SlotState.FREE)

    def requeue(self, slot: int) -> None:
        """The reader did not use it: it is the oldest full one again."""
        self._move(slot, SlotState.READING, SlotState.FULL)
        self._full.appendleft(slot)

    def _move(self, slot: int, before: SlotState, after: SlotState) -> None:
        if self.states[slot] is not before:
            raise ExperienceError(
                f"slot {slot} of the ring is {self.states[slot].value}, so it cannot go from {before.value} to "
                f"{after.value}. Claim, commit, take and release in this order, once each."
            )
        self.states[slot] = after
        if after is SlotState.FREE:
            heapq.heappush(self._free, slot)
