"""What other trainers call our metrics, and which of their numbers belong together.

`telemetry.metrics.METRICS` says what our names mean; a tag is in a table only if it means the same. All others keep
their own name. `provenance` is the way back, so that every curve can say where its numbers come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from palaestra.runs.runner import EventFiles, JournalFile, Source, StdoutLines
from palaestra.telemetry.event import EpisodeSummary

__all__ = ["EPISODES", "TAGS", "EpisodeTags", "Pending", "TagPairing", "canonical", "provenance"]

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
"""By the name a runner gives in `EventFiles`."""


class EpisodeTags(NamedTuple):
    """Two numbers that are written one after the other at the end of every episode."""

    episode_return: str
    length: str


EPISODES: dict[str, EpisodeTags] = {"cleanrl": EpisodeTags("charts/episodic_return", "charts/episodic_length")}
"""Tables whose trainers write single episodes."""


def canonical(table: Mapping[str, str], tag: str) -> str:
    """Our name of a tag; its own when we have none."""
    return table.get(tag, tag)


def provenance(sources: tuple[Source, ...], name: str) -> str:
    """Where the numbers of a metric come from: `journal`, or the kind of source and the tag there."""
    if not sources or any(isinstance(source, JournalFile) for source in sources):
        return "journal"
    for source in sources:
        if isinstance(source, EventFiles):
            return f"tensorboard:{_tag(source.tags, name)}"
    grammar = next(source.grammar for source in sources if isinstance(source, StdoutLines))
    return f"stdout:{_tag(grammar, name)}"


def _tag(table: str, name: str) -> str:
    episodes = EPISODES.get(table)
    if episodes and name in ("episode/return", "episode/length"):
        return episodes.episode_return if name == "episode/return" else episodes.length
    return next((tag for tag, ours in TAGS.get(table, {}).items() if ours == name), name)


class Pending(NamedTuple):
    """A return whose length has not come yet."""

    step: int
    episode_return: float
    time: float


class TagPairing:
    """Makes episodes of returns and lengths. A return without a length is an episode of length 0."""

    def __init__(self, tags: EpisodeTags, pending: Pending | None = None) -> None:
        self._tags = tags
        self.pending = pending

    def take(self, tag: str, step: int, value: float, time: float) -> list[tuple[EpisodeSummary, float]] | None:
        """The episodes that this number completes; None when it is no number of an episode."""
        if tag == self._tags.episode_return:
            complete = self.left()
            self.pending = Pending(step, value, time)
            return complete
        if tag != self._tags.length:
            return None
        if self.pending is None or self.pending.step != step:
            return self.left()
        return self._end(int(value) if math.isfinite(value) else 0)

    def left(self) -> list[tuple[EpisodeSummary, float]]:
        """The episode that waits for a length which will not come any more."""
        return self._end(0)

    def _end(self, length: int) -> list[tuple[EpisodeSummary, float]]:
        pending, self.pending = self.pending, None
        if pending is None:
            return []
        return [(EpisodeSummary(pending.step, 0, 0, pending.episode_return, length), pending.time)]
