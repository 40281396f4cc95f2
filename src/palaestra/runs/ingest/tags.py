"""What other trainers call our metrics, and which of their numbers belong together.

docs/metrics.md explains our names; a tag is in a table only if it means the same. All others keep
their own name. `provenance` is the way back, so that every curve can say where its numbers come from.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from palaestra.runs.runner import EventFiles, JournalFile, Source, StdoutLines
from palaestra.telemetry.event import EpisodeSummary

TAGS: dict[str, dict[str, str]] = {
    "cleanrl": {
        "charts/learning_rate": "learning_rate",
        "charts/SPS": "steps_per_second",
        "losses/value_loss": "value_loss",
        "losses/policy_loss": "policy_loss",
        "losses/entropy": "entropy",
        "losses/approx_kl": "approx_kl",
        "losses/clipfrac": "clip_fraction",
        "losses/explained_variance": "explained_variance",
        "losses/loss": "loss",
    },
    "sb3": {
        "rollout/ep_rew_mean": "episode_return",
        "rollout/ep_len_mean": "episode_length",
        "rollout/success_rate": "success_rate",
        "time/fps": "steps_per_second",
        "time/episodes": "episodes",
        "train/approx_kl": "approx_kl",
        "train/clip_fraction": "clip_fraction",
        "train/clip_range": "clip_range",
        "train/explained_variance": "explained_variance",
        "train/learning_rate": "learning_rate",
        "train/loss": "loss",
        "train/policy_gradient_loss": "policy_loss",
        "train/value_loss": "value_loss",
        "eval/mean_reward": "eval_return",
        "eval/mean_ep_length": "eval_length",
    },
    "none": {},
}
"""Our metric name by tag, for each table name used in `EventFiles.tags`."""


class EpisodeTags(NamedTuple):
    """The tags of two values that are written one after the other at the end of every episode."""

    episode_return: str
    length: str


EPISODE_TAGS: dict[str, EpisodeTags] = {"cleanrl": EpisodeTags("charts/episodic_return", "charts/episodic_length")}
"""Tag tables of trainers that write single episodes."""


def provenance(sources: tuple[Source, ...], name: str) -> str:
    """Return the source of a metric: `journal`, or the kind of source and the tag there."""
    if not sources or any(isinstance(source, JournalFile) for source in sources):
        return "journal"
    for source in sources:
        if isinstance(source, EventFiles):
            return f"tensorboard:{_find_tag(source.tags, name)}"
    output_format = next(source.format for source in sources if isinstance(source, StdoutLines))
    return f"stdout:{_find_tag(output_format, name)}"


def _find_tag(table: str, name: str) -> str:
    episodes = EPISODE_TAGS.get(table)
    if episodes and name in ("episode/return", "episode/length"):
        return episodes.episode_return if name == "episode/return" else episodes.length
    return next((tag for tag, metric in TAGS.get(table, {}).items() if metric == name), name)


class PendingEpisode(NamedTuple):
    """A return whose length has not been read yet."""

    step: int
    episode_return: float
    time: float


class EpisodePairing:
    """Combines returns and lengths into episodes. A return without a length becomes an episode of length 0."""

    def __init__(self, tags: EpisodeTags, pending: PendingEpisode | None = None) -> None:
        self._tags = tags
        self.pending = pending

    def add(self, tag: str, step: int, value: float, time: float) -> list[tuple[EpisodeSummary, float]] | None:
        """Return the episodes that this value completes; None when the tag is not an episode's."""
        if tag == self._tags.episode_return:
            completed = self.flush()
            self.pending = PendingEpisode(step, value, time)
            return completed
        if tag != self._tags.length:
            return None
        if self.pending is None or self.pending.step != step:
            return self.flush()
        return self.flush(int(value) if math.isfinite(value) else 0)

    def flush(self, length: int = 0) -> list[tuple[EpisodeSummary, float]]:
        """Complete the pending episode, if any, with this length."""
        pending, self.pending = self.pending, None
        if pending is None:
            return []
        return [(EpisodeSummary(pending.step, 0, 0, pending.episode_return, length), pending.time)]
