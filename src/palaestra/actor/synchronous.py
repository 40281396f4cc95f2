"""`SynchronousSource`: collects a rollout when the learner asks for a batch, in the caller's thread."""

from __future__ import annotations

import time

from palaestra.actor.collector import Collector
from palaestra.experience.buffer import RolloutBuffer
from palaestra.transport.source import Batch, ExperienceSource, SavedState, Timing, TrainingProgress


class SynchronousSource(ExperienceSource[RolloutBuffer]):
    """Collects rollouts into one buffer, which the next batch overwrites."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.progress = TrainingProgress()
        self.num_steps, self._version = 0, 0
        self._buffer: RolloutBuffer | None = None

    def start(self, version: int, num_steps: int) -> None:
        """Collect `num_steps` steps of every environment per batch, with the policy at `version`."""
        self._version, self.num_steps = version, num_steps

    def next_batch(self) -> Batch[RolloutBuffer]:
        """Collect a rollout."""
        began = time.perf_counter()
        self._buffer = self.collector.collect(self.num_steps, self._buffer, policy_version=self._version)
        self._buffer.is_fresh = True
        seconds = time.perf_counter() - began
        steps, episodes = self.num_steps * self._buffer.num_envs, self.collector.episodes
        self.progress.add(steps, episodes)
        return Batch(self._buffer, episodes, steps, {"collect_seconds": seconds})

    def release(self, batch: Batch[RolloutBuffer], version: int) -> None:
        """Count the batch; the next one overwrites it."""
        self._version = version
        self.progress.updates += 1

    def requeue(self, batch: Batch[RolloutBuffer]) -> None:
        """Subtract the steps of a batch that was not learned from."""
        self.progress.add(-batch.steps)

    def metrics(self, batch: Batch[RolloutBuffer], timing: Timing) -> dict[str, float]:
        """Counters, times and the latest episodes."""
        return rollout_metrics(self.progress, batch, timing)

    def state(self) -> SavedState:
        """The state of the environments."""
        return self.collector.state()

    def load_state(self, state: SavedState) -> bool:
        """Continue from `state`; False if the environments start new episodes."""
        return self.collector.load_state(state)


def rollout_metrics(progress: TrainingProgress, batch: Batch[RolloutBuffer], timing: Timing) -> dict[str, float]:
    """Metrics of every source of rollouts."""
    return {
        "env_step": float(progress.steps),
        "update": float(progress.updates),
        "episodes": float(progress.episodes),
        "learn_seconds": timing.total - timing.waited,
        "steps_per_second": batch.steps / max(timing.total, 1e-9),
        **batch.metrics,
        **progress.metrics(),
    }
