"""`VLABuffer`: a ring of whole, time-ordered segments between a collector that never stops and a learner.

Used step by step in one thread it is a circular buffer: `add` overwrites the oldest step once it is full, and `get`
gives the steps it holds, oldest first. A collector in the background fills longer segments and waits for the reader.

All memory is allocated at the start. A segment is `[segment_length, num_envs]`, each column one environment's unbroken
stream, so advantages never cross environments or the seam of the ring. Each segment lies in a slot, which goes free ->
filling -> full -> reading -> free. What is being read is never overwritten: a full ring makes the writer wait
(`block`), or lose the oldest unread segment, counted in `dropped_steps` (`overwrite_oldest`). Threads may share it; two
processes share its memory, and one of them keeps the books.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

from palaestra.errors import ConfigError, ExperienceError
from palaestra.experience.buffer import Memory, RolloutBuffer, read_steps
from palaestra.experience.columns import ArraySpec, ObservationSpec
from palaestra.processes.memory import check_fits_in_memory

if TYPE_CHECKING:
    from tensordict import TensorDict

    from palaestra.experience.rollout import Rollout

__all__ = ["Overflow", "VLABuffer", "check_whole_segments"]

Overflow: TypeAlias = Literal["block", "overwrite_oldest"]
"""What happens when a new segment finds no room: wait for the reader, or lose the oldest unread one (counted)."""

SlotState: TypeAlias = Literal["free", "filling", "full", "reading"]


class VLABuffer:
    """Room for `buffer_size` steps of `num_envs` environments, in segments of `segment_length`."""

    def __init__(
        self,
        buffer_size: int,
        num_envs: int,
        observation: ObservationSpec,
        action: ArraySpec,
        *,
        segment_length: int = 1,
        overflow: Overflow = "overwrite_oldest",
        mask_size: int = 0,
        chunk: int = 1,
        memory: Memory = np.zeros,
    ) -> None:
        """`segment_length`: how many steps are overwritten and read together.

        `overflow="block"` makes `add` wait for a reader in another thread instead of overwriting.
        """
        _check_sizes(buffer_size, segment_length, num_envs, overflow)
        self.segment_length, self.num_envs = segment_length, num_envs
        count, shape = buffer_size // segment_length, (segment_length, num_envs, observation, action)
        if memory is np.zeros:
            needed = count * RolloutBuffer.bytes_needed(*shape, mask_size=mask_size, chunk=chunk)
            parts = {f"{buffer_size:,} steps x {num_envs} environments": needed}
            check_fits_in_memory(
                "VLABuffer(buffer_size)", buffer_size, parts, "Make it smaller, or use fewer environments"
            )
        options: dict[str, Any] = {"mask_size": mask_size, "chunk": chunk, "memory": memory}
        self.segments = [RolloutBuffer(*shape, **options) for _ in range(count)]
        self.overflow: Overflow = overflow
        self.states: list[SlotState] = ["free"] * count
        self.full: deque[int] = deque()
        """Slots that wait to be read, oldest first."""
        self._free = list(range(count))  # a heap: the lowest number is filled first
        self.changed = threading.Condition()
        """Held while the books are read or changed, and notified after; waits end when a slot changes hands."""
        self.dropped_steps = 0
        """Steps over all environments that were recorded and never read: overwritten, too old, or unfinished."""
        self._filling: int | None = None
        self._added = 0

    @property
    def buffer_size(self) -> int:
        """Steps per environment that fit."""
        return self.segment_length * len(self.segments)

    @property
    def unread_steps(self) -> int:
        """Steps over all environments that wait to be read."""
        return len(self) * self.segment_length * self.num_envs

    @property
    def num_busy(self) -> int:
        """How many slots are not free."""
        return len(self.segments) - len(self._free)

    def __len__(self) -> int:
        """Whole segments that wait to be read."""
        with self.changed:
            return len(self.full)

    def is_full(self) -> bool:
        """Whether every segment is whole and unread."""
        return len(self) == len(self.segments)

    # ------------------------------------------------------------------ step by step, for one writer

    def add(self, transition: Mapping[str, Any] | TensorDict, *, timeout: float | None = None) -> None:
        """Append one step `[N, ...]` or several `[t, N, ...]`, by key.

        On a full ring that blocks, waits until a reader makes room: for ever, or `timeout` seconds.
        """
        given, steps = read_steps(transition, "VLABuffer.add")
        done = 0
        while done < steps:
            if self._filling is None:
                self._filling = self._begin(timeout)
            segment = self.segments[self._filling]
            part = min(steps - done, segment.num_steps - segment.position)
            segment.add(given if part == steps else _slice(given, done, done + part))
            done += part
            self._added += part
            if segment.is_full():
                self.commit(self._filling)
                self._filling = None

    def _begin(self, timeout: float | None) -> int:
        slot = self.claim(timeout)
        if slot is None:
            raise ExperienceError(
                f"VLABuffer.add: the ring of {len(self.segments)} segments stayed full for {timeout:g} s. "
                "Read it with get(), or use overflow='overwrite_oldest'."
            )
        self.segments[slot].reset()
        self.segments[slot].first_env_step = self._added
        return slot

    def get(self, flatten: bool = False) -> Rollout | TensorDict:
        """Everything whole and unread that follows on without a gap, oldest first, copied out; frees its room.

        `[T, N]`, or `[T * N]` with `flatten`.
        """
        taken: list[int] = []
        expected: int | None = None
        while (slot := self.take(expected)) is not None:
            taken.append(slot)
            expected = self.segments[slot].first_env_step + self.segment_length
        if not taken:
            raise ExperienceError("VLABuffer.get: no segment is whole yet. Ask is_full() or len() first.")
        first = self.segments[taken[0]]
        whole = RolloutBuffer(len(taken) * self.segment_length, **first.made_for)
        whole.first_stream, whole.first_env_step = first.first_stream, first.first_env_step
        for slot in taken:
            whole.append(self.segments[slot])
        columns = whole.columns()
        scales = torch.tensor([self.segments[slot].reward_scale for slot in taken], dtype=torch.float32)
        columns["reward_scale"] = scales.repeat_interleave(self.segment_length).unsqueeze(1).expand(-1, self.num_envs)
        for slot in taken:
            self.release(slot)
        from palaestra.experience.rollout import Rollout  # importing tensordict costs a second: only when asked for

        rollout = Rollout.from_columns(columns)
        return rollout.reshape(-1) if flatten else rollout

    # ------------------------------------------------------------------ segment by segment, for a collector

    def claim(self, timeout: float | None = 0.0) -> int | None:
        """A slot to fill; None when there is none within `timeout` seconds (None waits for ever)."""
        with self.changed:
            if timeout != 0.0:  # even the shortest wait lets go of the lock, which a caller may hold for a reason
                self.changed.wait_for(lambda: self._free or (self.full and self.overflow != "block"), timeout)
            if self._free:
                slot = heapq.heappop(self._free)
            elif self.full and self.overflow != "block":
                slot = self.full.popleft()
                self.dropped_steps += self.segment_length * self.num_envs
            else:
                return None
            self.states[slot] = "filling"
            return slot

    def commit(self, slot: int) -> None:
        """The segment is whole; a reader may take it."""
        with self.changed:
            self._move(slot, "filling", "full")
            self.full.append(slot)

    def abandon(self, slot: int, steps: int) -> None:
        """The segment will not be finished: its `steps` (over all environments) are counted as dropped."""
        with self.changed:
            self._move(slot, "filling", "free")
            self.dropped_steps += steps

    def take(self, first_env_step: int | None = None) -> int | None:
        """The oldest whole segment's slot, protected until `release`; None if there is none (starting there)."""
        with self.changed:
            if not self.full or first_env_step not in (None, self.segments[self.full[0]].first_env_step):
                return None
            slot = self.full.popleft()
            self.states[slot] = "reading"
            return slot

    def release(self, slot: int, *, dropped: bool = False) -> None:
        """The reader has done with the segment, or (`dropped`) has no use for it: then it is counted."""
        with self.changed:
            self._move(slot, "reading", "free")
            if dropped:
                self.dropped_steps += self.segment_length * self.num_envs

    def requeue(self, slot: int) -> None:
        """The reader did not get to use the segment: it is unread again, and the oldest."""
        with self.changed:
            self._move(slot, "reading", "full")
            self.full.appendleft(slot)

    def _move(self, slot: int, before: SlotState, after: SlotState) -> None:
        if self.states[slot] != before:
            raise ExperienceError(
                f"slot {slot} of the ring is {self.states[slot]}, so it cannot go from {before} to {after}. Claim, "
                "commit, take and release in this order, once each."
            )
        self.states[slot] = after
        if after == "free":
            heapq.heappush(self._free, slot)
        self.changed.notify_all()


def check_whole_segments(buffer_size: int, length: int, *, place: str) -> None:
    """Refuse a ring that does not hold segments of `length` steps, at least one and no part of one."""
    if buffer_size < length:
        remedy = f"Give at least {length}; {2 * length} lets collecting go on while learning"
        raise ConfigError(place, buffer_size, f"is smaller than one segment of {length} steps", remedy)
    if buffer_size % length:
        below = buffer_size // length * length
        reason = f"does not hold whole segments of {length} steps"
        raise ConfigError(place, buffer_size, reason, f"Nearest: {below} and {below + length}")


def _check_sizes(buffer_size: int, length: int, num_envs: int, overflow: str) -> None:
    for name, number in (("num_envs", num_envs), ("segment_length", length), ("buffer_size", buffer_size)):
        if number < 1:
            raise ConfigError(f"VLABuffer({name})", number, "must be at least 1")
    check_whole_segments(buffer_size, length, place="VLABuffer(buffer_size)")
    if overflow not in ("block", "overwrite_oldest"):
        raise ConfigError("VLABuffer(overflow)", overflow, "is not 'block' or 'overwrite_oldest'")


def _slice(given: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {
        key: _slice(value, start, stop) if isinstance(value, Mapping) else value[start:stop]
        for key, value in given.items()
    }
