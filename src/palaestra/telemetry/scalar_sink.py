"""What sinks that draw curves have in common: one point per metric and update, single episodes as means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from palaestra.telemetry.episode import EpisodeMeans
from palaestra.telemetry.event import EpisodeSummary, Event, TrainingStep

__all__ = ["ScalarSink"]


class ScalarSink(ABC):
    """Writes the metrics of updates over environment steps.

    `episode_return` and `episode_length` are the trainer's own when it reports them, and otherwise the means of the
    episodes that ended since the last update. With `single_episodes` each of them is written, too, as `episode/return`
    and `episode/length` at the step at which it ended.
    """

    def __init__(self, *, single_episodes: bool = False) -> None:
        self._single_episodes = single_episodes
        self._episodes = EpisodeMeans()
        self._closed = False

    def emit(self, event: Event) -> None:
        """Write an update's metrics; count an episode in; ignore the rest, and everything after `close`."""
        if self._closed:
            return
        if isinstance(event, EpisodeSummary):
            self._episodes.add(event)
            if self._single_episodes:
                single = {"episode/return": event.episode_return, "episode/length": float(event.length)}
                self._write(event.env_step, single)
        elif isinstance(event, TrainingStep):
            self._write(event.env_step, self._episodes.take() | event.metrics)

    def close(self) -> None:
        """Write the means of the last episodes and finish. Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        left_over = self._episodes.take()
        if left_over:
            self._write(self._episodes.env_step, left_over)
        self._finish()

    @abstractmethod
    def flush(self) -> None:
        """Have others see all that was emitted."""

    @abstractmethod
    def _write(self, env_step: int, metrics: Mapping[str, float]) -> None: ...

    @abstractmethod
    def _finish(self) -> None: ...
