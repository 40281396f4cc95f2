"""`VLABuffer`: a ring of complete, time-ordered segments between a collector and a learner.

Used step by step in one thread it is a circular buffer: `add` overwrites the oldest step when it is full, and `get`
returns the stored steps, oldest first. An asynchronous collector fills longer segments and waits for the reader.

All memory is preallocated. A segment is `[segment_length, num_envs]`; each column is one environment's unbroken stream,
so advantages never cross environments or segments. The slot of a segment goes free -> filling -> full -> reading ->
free. A segment being read is never overwritten: if the ring is full, the writer waits (`block`) or the oldest unread
segment is dropped and counted in `dropped_steps` (`overwrite_oldest`). It is thread-safe; between processes, memory is
shared and only one process tracks the slots.
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

Overflow: TypeAlias = Literal["block", "overwrite_oldest"]
"""If the ring is full: wait for the reader, or drop the oldest unread segment."""

SlotState: TypeAlias = Literal["free", "filling", "full", "reading"]


class VLABuffer:
    """A ring of `buffer_size` steps of `num_envs` environments, in segments of `segment_length`."""

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
        """`segment_length`: number of steps that are overwritten and read together.

        With `overflow="block"`, `add` waits for a reader in another thread instead of overwriting.
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
        """Unread slots, oldest first."""
        self._free = list(range(count))  # a heap: the lowest slot is filled first
        self.changed = threading.Condition()
        """Guards the slot states; notified after every change."""
        self.dropped_steps = 0
        """Recorded steps over all environments that were never read: overwritten, too stale, or unfinished."""
        self._filling: int | None = None
        self._added = 0

    @property
    def buffer_size(self) -> int:
        """Capacity in steps per environment."""
        return self.segment_length * len(self.segments)

    @property
    def unread_steps(self) -> int:
        """Unread steps over all environments."""
        return len(self) * self.segment_length * self.num_envs

    @property
    def num_busy(self) -> int:
        """Number of slots that are not free."""
        return len(self.segments) - len(self._free)

    def __len__(self) -> int:
        """Number of unread segments."""
        with self.changed:
            return len(self.full)

    def is_full(self) -> bool:
        """Whether every segment is unread."""
        return len(self) == len(self.segments)

    # ------------------------------------------------------------------ step by step, for one writer

    def add(self, transition: Mapping[str, Any] | TensorDict, *, timeout: float | None = None) -> None:
        """Append one step `[N, ...]` or several `[t, N, ...]`, by key.

        If the ring is full and blocks, waits for a reader, at most `timeout` seconds.
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
        """Copy and free the oldest consecutive unread segments, as `[T, N]`, or `[T * N]` with `flatten`."""
        taken: list[int] = []
        expected: int | None = None
        while (slot := self.take(expected)) is not None:
            taken.append(slot)
            expected = self.segments[slot].first_env_step + self.segment_length
        if not taken:
            raise ExperienceError("VLABuffer.get: no segment is complete yet. Check is_full() or len() first.")
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
        from palaestra.experience.rollout import Rollout  # importing tensordict takes a second

        rollout = Rollout.from_columns(columns)
        return rollout.reshape(-1) if flatten else rollout

    # ------------------------------------------------------------------ segment by segment, for a collector

    def claim(self, timeout: float | None = 0.0) -> int | None:
        """A slot to fill; None if there is none within `timeout` seconds (None: no limit)."""
        with self.changed:
            if timeout != 0.0:  # even the shortest wait releases the lock, which a caller may hold
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
        """Mark a segment as complete and readable."""
        with self.changed:
            self._move(slot, "filling", "full")
            self.full.append(slot)

    def abandon(self, slot: int, steps: int) -> None:
        """Free an unfinished segment; its `steps` over all environments count as dropped."""
        with self.changed:
            self._move(slot, "filling", "free")
            self.dropped_steps += steps

    def take(self, first_env_step: int | None = None) -> int | None:
        """The slot of the oldest unread segment, reserved until `release`; None if there is none (at that step)."""
        with self.changed:
            if not self.full or first_env_step not in (None, self.segments[self.full[0]].first_env_step):
                return None
            slot = self.full.popleft()
            self.states[slot] = "reading"
            return slot

    def release(self, slot: int, *, dropped: bool = False) -> None:
        """Free a segment after reading; with `dropped` its steps count as dropped."""
        with self.changed:
            self._move(slot, "reading", "free")
            if dropped:
                self.dropped_steps += self.segment_length * self.num_envs

    def requeue(self, slot: int) -> None:
        """Make a segment the oldest unread one again."""
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
    """Raise `ConfigError` unless the ring holds a whole number of segments of `length` steps."""
    if buffer_size < length:
        remedy = f"Give at least {length}; {2 * length} lets collection continue during learning"
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
