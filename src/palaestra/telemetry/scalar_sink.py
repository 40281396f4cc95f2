"""Base class of the sinks for TensorBoard and W&B: one point per metric and update, episodes as means.

A fast environment ends thousands of episodes per second, so episodes are averaged between updates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from palaestra.telemetry.event import EpisodeSummary, Event, TrainingStep


class ScalarSink(ABC):
    """Writes the metrics of updates over environment steps.

    `episode_return` and `episode_length` are those of the trainer if it reports them, otherwise the means of the
    episodes since the last update. With `single_episodes`, each episode is also written as `episode/return` and
    `episode/length` at the step at which it ended.
    """

    def __init__(self, *, single_episodes: bool = False) -> None:
        self._single_episodes = single_episodes
        self._num_episodes, self._return_sum, self._length_sum = 0, 0.0, 0
        self._last_episode_step = 0
        self._closed = False

    def emit(self, event: Event) -> None:
        """Write the metrics of an update or add an episode; other events and events after `close` are ignored."""
        if self._closed:
            return
        if isinstance(event, EpisodeSummary):
            self._num_episodes += 1
            self._return_sum += event.episode_return
            self._length_sum += event.length
            self._last_episode_step = event.env_step
            if self._single_episodes:
                single = {"episode/return": event.episode_return, "episode/length": float(event.length)}
                self._write(event.env_step, single)
        elif isinstance(event, TrainingStep):
            self._write(event.env_step, self._pop_episode_means() | event.metrics)

    def close(self) -> None:
        """Write the means of the last episodes and finish. May be called more than once."""
        if self._closed:
            return
        self._closed = True
        means = self._pop_episode_means()
        if means:
            self._write(self._last_episode_step, means)
        self._finish()

    def _pop_episode_means(self) -> dict[str, float]:
        if not self._num_episodes:
            return {}
        means = {
            "episode_return": self._return_sum / self._num_episodes,
            "episode_length": self._length_sum / self._num_episodes,
        }
        self._num_episodes, self._return_sum, self._length_sum = 0, 0.0, 0
        return means

    @abstractmethod
    def flush(self) -> None:
        """Make everything that was emitted visible to readers."""

    @abstractmethod
    def _write(self, env_step: int, metrics: Mapping[str, float]) -> None: ...

    @abstractmethod
    def _finish(self) -> None: ...
