"""The arrow from actors to the learner: `Batch`, and the `ExperienceSource` that gives one after the other.

A source lends a batch to the learner until `release` (it was learned from) or `requeue` (it was not). It counts what it
gave (`TrainingProgress`), and its `state` brings it back to where it stands. Whether experience is collected when asked, by a
thread, by another process, by a pool of actors, or read from disk, is the source's own business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from torch import Tensor

__all__ = ["Batch", "EpisodeStats", "ExperienceSource", "SavedState", "Timing", "TrainingProgress"]

E = TypeVar("E")
RECENT = 100
"""Episodes over which returns and lengths are averaged."""


class SavedState(NamedTuple):
    """Everything that the next number depends on."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    """Plain JSON."""


class EpisodeStats(NamedTuple):
    """An episode that ended while a batch was collected."""

    env_step: int
    """Steps that all environments together had taken when it ended."""
    env_index: int
    episode_return: float
    length: int
    success: bool | None = None
    """Whether the task was solved; None where the environment does not report it."""


@dataclass(frozen=True)
class Batch(Generic[E]):
    """Experience lent to the learner."""

    experience: E
    episodes: Sequence[EpisodeStats] = ()
    """Episodes that ended in it."""
    steps: int = 0
    """What it adds to `TrainingProgress.steps`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """How it was collected."""
    origin: Any = None
    """What the source needs to take it back."""


class Timing(NamedTuple):
    """Where the time of one update went, in seconds."""

    waited: float
    """Until the batch was there."""
    whole: float


class TrainingProgress:
    """How much experience a learner has been given, and how the latest episodes went."""

    def __init__(self) -> None:
        self.updates = 0
        """Batches that were released."""
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
        """The latest episodes in numbers."""
        metrics: dict[str, float] = {}
        if self.returns:
            metrics["episode_return"] = float(np.mean(self.returns))
            metrics["episode_return_min"] = float(np.min(self.returns))
            metrics["episode_return_max"] = float(np.max(self.returns))
            metrics["episode_length"] = float(np.mean(self.lengths))
        if self.successes:
            metrics["success_rate"] = float(np.mean(self.successes))
        return metrics

    def facts(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "updates": self.updates,
            "steps": self.steps,
            "episodes": self.episodes,
            "episode_rewards": list(self.returns),
            "episode_lengths": list(self.lengths),
            "episode_successes": list(self.successes),
        }

    def load(self, facts: Mapping[str, Any]) -> None:
        """Count on from `facts`."""
        self.updates, self.steps = int(facts["updates"]), int(facts["steps"])
        self.episodes = int(facts.get("episodes", 0))
        self.returns = deque(facts.get("episode_rewards", ()), maxlen=RECENT)
        self.lengths = deque(facts.get("episode_lengths", ()), maxlen=RECENT)
        self.successes = deque(facts.get("episode_successes", ()), maxlen=RECENT)


class ExperienceSource(Protocol[E]):
    """Gives batches in the order in which they were collected."""

    progress: TrainingProgress

    def next_batch(self) -> Batch[E] | None:
        """Wait for the next batch; None when there will be none because the run was asked to stop."""

    def release(self, batch: Batch[E], version: int) -> None:
        """The learner is done with the batch and at `version`, whose weights have been published."""

    def requeue(self, batch: Batch[E]) -> None:
        """The batch was not learned from: where it can be kept, it is the next one again."""

    def raise_if_failed(self) -> None:
        """Raise `CollectorFailed` when collection has failed; called within long updates."""

    def metrics(self, batch: Batch[E], timing: Timing) -> dict[str, float]:
        """What there is to report about a batch that was released."""

    def state(self) -> SavedState:
        """Where collection stands."""

    def load_state(self, state: SavedState) -> bool:
        """Continue from there; False when the environments start new episodes instead."""

    def close(self) -> None:
        """End collection in bounded time. Harmless when repeated."""
