"""`DatasetSource`: minibatches of transitions from arrays in memory, for offline learning."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from palaestra.errors import ExperienceError
from palaestra.experience.columns import map_column
from palaestra.experience.replay import COLUMNS, Arrays, TransitionBatch
from palaestra.transport.source import Batch, ExperienceSource, SavedState, Timing, TrainingProgress


class DatasetSource(ExperienceSource[TransitionBatch]):
    """Samples transitions with replacement. A step of its progress is a gradient step."""

    def __init__(
        self, columns: Arrays, *, batch_size: int, steps_per_batch: int = 100, total: int | None = None, seed: int = 0
    ) -> None:
        """`columns`: arrays `[n, ...]`, not copied. `total`: gradient steps in all, to which the last batch is cut."""
        missing = [name for name in COLUMNS if name not in columns]
        if missing or len(columns["reward"]) == 0:
            reason = f"they have no {missing[0]}" if missing else "there are none"
            raise ExperienceError(f"DatasetSource: cannot sample from these transitions: {reason}.")
        self.columns = {name: columns[name] for name in COLUMNS}
        self.size = len(columns["reward"])
        self.batch_size, self.steps_per_batch, self.total = batch_size, steps_per_batch, total
        self.progress = TrainingProgress()
        self._rng = np.random.default_rng(np.random.SeedSequence([seed, 8]))
        self._requeued: Batch[TransitionBatch] | None = None

    def sample(self, steps: int, batch_size: int) -> Arrays:
        """Columns `[steps, batch_size, ...]`."""
        index = self._rng.integers(0, self.size, (steps, batch_size))
        return {name: map_column(column, lambda part: _take(part, index)) for name, column in self.columns.items()}

    def next_batch(self) -> Batch[TransitionBatch]:
        """Sample the minibatches of one update."""
        if self._requeued is not None:
            batch, self._requeued = self._requeued, None
        else:
            left = self.steps_per_batch if self.total is None else self.total - self.progress.steps
            steps = max(1, min(self.steps_per_batch, left))
            batch = Batch(TransitionBatch(self.sample(steps, self.batch_size)), (), steps)
        self.progress.add(batch.steps)
        return batch

    def release(self, batch: Batch[TransitionBatch], version: int) -> None:
        """Count the batch."""
        self.progress.updates += 1

    def requeue(self, batch: Batch[TransitionBatch]) -> None:
        """Return the batch again next."""
        self.progress.add(-batch.steps)
        self._requeued = batch

    def metrics(self, batch: Batch[TransitionBatch], timing: Timing) -> dict[str, float]:
        """Counters and times."""
        return {
            "env_step": float(self.progress.steps),
            "update": float(self.progress.updates),
            "learn_seconds": timing.total - timing.waited,
            "steps_per_second": batch.steps / max(timing.total, 1e-9),
            "gradient_steps_per_second": batch.experience.shape[0] / max(timing.total, 1e-9),
        }

    def state(self) -> SavedState:
        """The state of the generator. A requeued batch is not kept."""
        return SavedState({}, {"rng": self._rng.bit_generator.state, "transitions": self.size})

    def load_state(self, state: SavedState) -> bool:
        """Continue with the next minibatch."""
        stored = int(state.facts.get("transitions", self.size))
        if stored != self.size:
            raise ExperienceError(f"DatasetSource: the state is of {stored} transitions, these are {self.size}.")
        self._rng.bit_generator.state = state.facts["rng"]
        return True


def _take(part: NDArray[Any], index: NDArray[np.int64]) -> NDArray[Any]:
    return part[index]
