"""Whether recorded log-probabilities are those of the weights that the tokens name as their source.

`Agreement` collects the distances, token by token, and `why_disagreeing` judges them. When they differ, sampler and
learner do not have the same weights or do not see the same pictures, or the recording was changed on its way; learning
from it would look healthy while it goes wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from palaestra.experience.trajectory import Trajectory, Turn
from palaestra.learner.trajectories.proof import ProofConfig

__all__ = ["Agreement", "Disagreement", "why_disagreeing"]

OF_ONE_EPISODE = 4.0
"""How many times the mean of a batch a single episode's may be: a few unlikely tokens weigh more in it."""


class Disagreement(NamedTuple):
    """How far recorded log-probabilities are from those of the weights they name."""

    mean: float
    maximum: float
    tokens: int
    episode_mean: float = 0.0
    """Of the episode in which they differ most."""
    episode: str = ""
    """The id of that episode."""
    worst: str = ""
    """Where the single largest distance is."""


class Agreement:
    """Distances of the tokens of an update, so far."""

    def __init__(self, trajectories: Sequence[Trajectory] = ()) -> None:
        self._places = {
            id(turn): (one.episode_id, number) for one in trajectories for number, turn in enumerate(one.turns)
        }
        self._distances: dict[tuple[int, int], Tensor] = {}
        """By turn and version."""

    def add(self, turn: Turn, log_probs: Tensor, version: int) -> float:
        """`log_probs` of the turn's tokens under the weights of a version, whose tokens are compared.

        Returns the largest distance among them; 0 when there are none.
        """
        of_version = torch.from_numpy(turn.versions == version)
        if not bool(of_version.any()):
            return 0.0
        recorded = torch.tensor(turn.log_probs, dtype=torch.float32)
        distances = (log_probs.detach().float().cpu() - recorded)[of_version].abs()
        self._distances[id(turn), version] = distances
        return float(distances.max())

    def disagreement(self) -> Disagreement:
        """All of it."""
        if not self._distances:
            return Disagreement(0.0, 0.0, 0)
        every = torch.cat(list(self._distances.values())).double()
        worst, _ = max(self._distances, key=lambda key: float(self._distances[key].max()))
        episodes: dict[str, list[Tensor]] = {}
        for (turn, _), distances in self._distances.items():
            episodes.setdefault(self._place(turn)[0], []).append(distances)
        means = {name: float(torch.cat(parts).double().mean()) for name, parts in episodes.items()}
        name = max(means, key=means.__getitem__)
        place = "episode {}, turn {}".format(*self._place(worst))
        return Disagreement(float(every.mean()), float(every.max()), every.numel(), means[name], name, place)

    def _place(self, turn: int) -> tuple[str, int]:
        return self._places.get(turn, ("?", 0))


def why_disagreeing(found: Disagreement, config: ProofConfig, *, half_precision: bool = True) -> str | None:
    """Why the batch cannot be trusted; None when it can, or when there was nothing to compare."""
    mean, largest = config.bounds(half_precision=half_precision)
    allowed = OF_ONE_EPISODE * mean
    # Written so that a distance that is no number is too large.
    if found.tokens == 0 or (found.mean <= mean and found.maximum <= largest and found.episode_mean <= allowed):
        return None
    return (
        f"sampler and learner disagree about {found.tokens} tokens of the same weights: log-probabilities differ by "
        f"{found.mean:.3g} on average (allowed {mean:g}), by {found.episode_mean:.3g} in episode "
        f"{found.episode} (allowed {allowed:g}), at most by {found.maximum:.3g} in {found.worst} (allowed "
        f"{largest:g}). Likely causes: the updated weights (a LoRA adapter) did not reach the sampler; "
        "the two see different pictures or sizes; another temperature, chat template or precision; an edited recording."
    )
