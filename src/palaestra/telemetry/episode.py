"""Means over the episodes that ended since somebody last looked.

A fast environment ends thousands of episodes a second. Chart sinks (TensorBoard, W&B) want one point per
update, so they add episodes up here and take the means with the next `TrainingStep`. Keeps two sums and no
episode.
"""

from __future__ import annotations

from palaestra.telemetry.event import EpisodeSummary

__all__ = ["EpisodeMeans"]


class EpisodeMeans:
    """Sums that turn into means when taken."""

    def __init__(self) -> None:
        self._count = 0
        self._return_sum = 0.0
        self._length_sum = 0
        self.env_step = 0
        """The environment step at which the last of them ended."""

    def add(self, episode: EpisodeSummary) -> None:
        """Count one episode in."""
        self._count += 1
        self._return_sum += episode.episode_return
        self._length_sum += episode.length
        self.env_step = episode.env_step

    def take(self) -> dict[str, float]:
        """The means under their metric names, and a fresh start; empty when no episode ended."""
        if not self._count:
            return {}
        means = {
            "episode_return": self._return_sum / self._count,
            "episode_length": self._length_sum / self._count,
        }
        self._count, self._return_sum, self._length_sum = 0, 0.0, 0
        return means
