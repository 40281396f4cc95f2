"""`ReplayBuffer`: a ring of transitions in preallocated arrays, sampled uniformly or by priority.

A transition is one step: observation, action, reward, next observation, and whether the episode terminated. The next
observation of the last step of an episode is its final observation, never the first one of the next episode, so a
truncated step bootstraps from the right state. `TransitionBatch` is what a learner receives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from palaestra.errors import ExperienceError
from palaestra.experience.columns import ArraySpec, ObservationSpec, map_column
from palaestra.processes.memory import check_fits_in_memory

Arrays: TypeAlias = dict[str, Any]
"""Columns of transitions; `observation` and `next_observation` may be dicts of arrays."""

COLUMNS = ("observation", "action", "reward", "next_observation", "terminated")


class TransitionBatch:
    """G minibatches of B transitions, for G gradient steps."""

    def __init__(self, columns: Arrays, index: NDArray[np.int64] | None = None) -> None:
        """`columns`: arrays `[G, B, ...]` by name. `index`: their places in a prioritised buffer."""
        self.columns, self.index = columns, index
        self.td_error: NDArray[np.float32] | None = None
        """Absolute errors `[G, B]`, which the learner reports for a prioritised buffer."""

    @property
    def shape(self) -> tuple[int, int]:
        """Gradient steps and batch size."""
        steps, size = self.columns["reward"].shape
        return int(steps), int(size)


class ReplayBuffer:
    """The newest `capacity` transitions."""

    def __init__(
        self,
        capacity: int,
        observation: ObservationSpec,
        action: ArraySpec,
        *,
        priority_exponent: float | None = None,
        place: str = "algorithm.buffer_size",
    ) -> None:
        """`priority_exponent`: sample in proportion to |error| to this power; None: uniformly.

        `place`: configuration key that an error about the size names.
        """
        needed = self.bytes_needed(capacity, observation, action)
        remedy = "Set a smaller buffer, or give the environment smaller observations"
        check_fits_in_memory(place, capacity, {f"{capacity:,} transitions": needed}, remedy)
        self.capacity, self.size, self._next = capacity, 0, 0

        def allocate(spec: ArraySpec) -> NDArray[Any]:
            return np.zeros((capacity, *spec.shape), spec.dtype)

        self._columns: Arrays = {
            "observation": map_column(observation, allocate),
            "action": allocate(action),
            "reward": np.zeros(capacity, np.float32),
            "next_observation": map_column(observation, allocate),
            "terminated": np.zeros(capacity, np.bool_),
        }
        self._priorities = None if priority_exponent is None else _PriorityTree(capacity, priority_exponent)

    @staticmethod
    def bytes_needed(capacity: int, observation: ObservationSpec, action: ArraySpec) -> int:
        """Memory of a full buffer."""
        parts = list(observation.values()) if isinstance(observation, Mapping) else [observation]
        seen = sum(math.prod(part.shape) * part.dtype.itemsize for part in parts)
        return capacity * (2 * seen + math.prod(action.shape) * action.dtype.itemsize + 5)

    def add(self, observation: Any, action: Any, reward: Any, next_observation: Any, terminated: Any) -> None:
        """Add `[n, ...]` transitions; the oldest ones are overwritten."""
        count = len(reward)
        if count > self.capacity:
            raise ExperienceError(f"ReplayBuffer.add: {count} transitions at once, the capacity is {self.capacity}.")
        given = dict(zip(COLUMNS, (observation, action, reward, next_observation, terminated), strict=True))
        first = min(count, self.capacity - self._next)
        for name, value in given.items():
            _write(self._columns[name], self._next, value, 0, first)
            if first < count:
                _write(self._columns[name], 0, value, first, count)
        if self._priorities is not None:
            self._priorities.add((self._next + np.arange(count)) % self.capacity)
        self._next = (self._next + count) % self.capacity
        self.size = min(self.size + count, self.capacity)

    def sample(
        self, rng: np.random.Generator, steps: int, batch_size: int, *, importance_exponent: float = 0.0
    ) -> TransitionBatch:
        """Draw `steps` minibatches with replacement.

        A prioritised buffer adds the column `weight`: importance weights to the power of `importance_exponent`, scaled
        so that the largest of each minibatch is 1.
        """
        if self.size == 0:
            raise ExperienceError("ReplayBuffer.sample: the buffer is empty. Add transitions first.")
        if self._priorities is None:
            return TransitionBatch(self.read(rng.integers(0, self.size, (steps, batch_size))))
        index, probability = self._priorities.sample(rng, steps, batch_size)
        columns = self.read(index)
        weight = (self.size * probability) ** -importance_exponent
        columns["weight"] = (weight / weight.max(-1, keepdims=True)).astype(np.float32)
        return TransitionBatch(columns, index)

    def read(self, index: NDArray[np.int64]) -> Arrays:
        """Copies of the transitions at `index`, in its shape; 0 is the oldest place of the memory, not of time."""
        return {name: map_column(column, lambda part: part[index]) for name, column in self._columns.items()}

    def update_priorities(self, batch: TransitionBatch) -> None:
        """Set the priorities of a sampled batch from the errors that the learner reported."""
        if self._priorities is not None and batch.index is not None and batch.td_error is not None:
            self._priorities.update(batch.index.reshape(-1), batch.td_error.reshape(-1))

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """The filled part as arrays and plain JSON. The arrays are views: write or copy them before the next `add`."""
        arrays: dict[str, NDArray[Any]] = {}
        for name, column in self._columns.items():
            parts = column if isinstance(column, dict) else {"": column}
            arrays |= {f"{name}/{key}" if key else name: part[: self.size] for key, part in parts.items()}
        if self._priorities is not None:
            arrays["priority"] = self._priorities.leaves[: self.size]
        facts = {"next": self._next, "size": self.size, "capacity": self.capacity}
        return arrays, facts if self._priorities is None else {**facts, "largest_priority": self._priorities.largest}

    def load_state(self, arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> None:
        """Continue from `state`. A buffer of another capacity keeps the newest transitions that fit."""
        size, start = int(facts["size"]), int(facts["next"])
        if int(facts["capacity"]) == self.capacity:
            order: Any = slice(0, size)
            self._next = start
        else:
            order = ((start - size + np.arange(size)) % int(facts["capacity"]))[-self.capacity :]
            size = len(order)
            self._next = size % self.capacity
        for name, column in self._columns.items():
            parts = column if isinstance(column, dict) else {"": column}
            for key, part in parts.items():
                part[:size] = arrays[f"{name}/{key}" if key else name][order]
        self.size = size
        if self._priorities is not None:
            stored = arrays.get("priority")
            leaves = np.ones(size) if stored is None else stored[order]
            self._priorities.load(leaves, float(facts.get("largest_priority", leaves.max(initial=1.0))))


class _PriorityTree:
    """Priorities in the leaves of a binary tree whose nodes hold the sums of their children."""

    def __init__(self, capacity: int, exponent: float) -> None:
        self._exponent = exponent
        self._first = 1 << max(1, capacity - 1).bit_length()
        self._nodes = np.zeros(2 * self._first)
        self.leaves = self._nodes[self._first : self._first + capacity]
        self.largest = 1.0
        """Largest priority so far, also of transitions that were overwritten."""

    def add(self, index: NDArray[np.int64]) -> None:
        """New transitions get the largest priority so far, so that each is soon sampled."""
        self._set(index, np.full(len(index), self.largest))

    def update(self, index: NDArray[np.int64], error: NDArray[np.floating[Any]]) -> None:
        priority = (np.abs(error).astype(np.float64) + 1e-6) ** self._exponent
        self.largest = max(self.largest, float(priority.max()))
        self._set(index, priority)

    def load(self, leaves: NDArray[np.float64], largest: float) -> None:
        self._nodes[:] = 0.0
        self.largest = largest
        self._set(np.arange(len(leaves)), leaves)

    def _set(self, index: NDArray[np.int64], priority: NDArray[np.float64]) -> None:
        self.leaves[index] = priority
        node = np.unique((index + self._first) >> 1)
        while node[0] >= 1:
            self._nodes[node] = self._nodes[2 * node] + self._nodes[2 * node + 1]
            if node[0] == 1:
                break
            node = np.unique(node >> 1)

    def sample(
        self, rng: np.random.Generator, steps: int, batch_size: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """One place from each of `batch_size` equal shares of the total, and the probability of each place."""
        total = self._nodes[1]
        mass = (np.arange(batch_size) + rng.random((steps, batch_size))) * (total / batch_size)
        node = np.ones((steps, batch_size), np.int64)
        while node.flat[0] < self._first:
            left = self._nodes[2 * node]
            # A place without priority is never chosen, also when rounding leaves the mass at the end of the tree.
            right = (mass >= left) & (self._nodes[2 * node + 1] > 0.0)
            mass = np.where(right, mass - left, mass)
            node = 2 * node + right
        return node - self._first, self._nodes[node] / total


def _write(column: Any, at: int, value: Any, start: int, stop: int) -> None:
    if isinstance(column, dict):
        for name, part in column.items():
            part[at : at + stop - start] = value[name][start:stop]
    else:
        column[at : at + stop - start] = value[start:stop]
