"""Experience from actors to the learner: `Batch`, and the `ExperienceSource` that returns one after the other.

A source lends a batch to the learner until `release` (it was learned from) or `requeue` (it was not). It counts what it
returned (`TrainingProgress`), and its `state` restores its position. A source may collect on demand, in a thread, in
another process or with a pool of actors, or read experience from disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from torch import Tensor

E = TypeVar("E")
RECENT = 100
"""Number of episodes over which returns and lengths are averaged."""


class SavedState(NamedTuple):
    """The state of a learner or a source, as a checkpoint stores it."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    """Plain JSON."""


class EpisodeStats(NamedTuple):
    """An episode that ended while a batch was collected."""

    env_step: int
    """Steps taken by all environments together when it ended."""
    env_index: int
    episode_return: float
    length: int
    success: bool | None = None
    """Whether the task was solved; None if the environment does not report it."""


@dataclass(frozen=True)
class Batch(Generic[E]):
    """Experience lent to the learner."""

    experience: E
    episodes: Sequence[EpisodeStats] = ()
    """Episodes that ended in it."""
    steps: int = 0
    """Steps it adds to `TrainingProgress.steps`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of its collection."""
    origin: Any = None
    """Private data of the source, needed by `release` and `requeue`."""


class Timing(NamedTuple):
    """Duration of one update in seconds."""

    waited: float
    """Time spent waiting for the batch."""
    total: float


class TrainingProgress:
    """How much experience the learner has received, and the results of the latest episodes."""

    def __init__(self) -> None:
        self.updates = 0
        """Number of released batches."""
        self.steps = 0
        self.episodes = 0
        self.returns: deque[float] = deque(maxlen=RECENT)
        self.lengths: deque[int] = deque(maxlen=RECENT)
        self.successes: deque[bool] = deque(maxlen=RECENT)

    def add(self, steps: int, episodes: Sequence[EpisodeStats] = ()) -> None:
        """Count steps and the episodes that ended in them."""
        self.steps += steps
        self.episodes += len(episodes)
        for episode in episodes:
            self.returns.append(episode.episode_return)
            self.lengths.append(episode.length)
            if episode.success is not None:
                self.successes.append(episode.success)

    def metrics(self) -> dict[str, float]:
        """Means and extremes over the latest episodes."""
        metrics: dict[str, float] = {}
        if self.returns:
            returns = np.array(self.returns)
            metrics["episode_return"] = float(returns.mean())
            metrics["episode_return_min"] = float(returns.min())
            metrics["episode_return_max"] = float(returns.max())
            metrics["episode_length"] = sum(self.lengths) / len(self.lengths)
        if self.successes:
            metrics["success_rate"] = float(np.mean(self.successes))
        return metrics

    def facts(self) -> dict[str, Any]:
        """The counters as plain JSON."""
        return {
            "updates": self.updates,
            "steps": self.steps,
            "episodes": self.episodes,
            "episode_rewards": list(self.returns),
            "episode_lengths": list(self.lengths),
            "episode_successes": list(self.successes),
        }

    def load(self, facts: Mapping[str, Any]) -> None:
        """Restore the counters from `facts`."""
        self.updates, self.steps = int(facts["updates"]), int(facts["steps"])
        self.episodes = int(facts.get("episodes", 0))
        self.returns = deque(facts.get("episode_rewards", ()), maxlen=RECENT)
        self.lengths = deque(facts.get("episode_lengths", ()), maxlen=RECENT)
        self.successes = deque(facts.get("episode_successes", ()), maxlen=RECENT)


class ExperienceSource(Protocol[E]):
    """Returns batches in the order in which they were collected. A subclass inherits `raise_if_failed` and `close`."""

    progress: TrainingProgress

    def next_batch(self) -> Batch[E] | None:
        """Wait for the next batch; None if the run was asked to stop."""

    def release(self, batch: Batch[E], version: int) -> None:
        """Take a batch back after the learner has learned from it and published `version`."""

    def requeue(self, batch: Batch[E]) -> None:
        """Take back a batch that was not learned from. A source that can keep it returns it again next."""

    def raise_if_failed(self) -> None:
        """Raise `CollectorFailed` if collection has failed. Called during long updates. By default nothing."""
        return

    def metrics(self, batch: Batch[E], timing: Timing) -> dict[str, float]:
        """The metrics of a released batch."""

    def state(self) -> SavedState:
        """The position of collection."""

    def load_state(self, state: SavedState) -> bool:
        """Continue from `state`; returns False if the environments start new episodes instead."""

    def close(self) -> None:
        """Stop collection in bounded time. May be called repeatedly. By default nothing."""
        return
