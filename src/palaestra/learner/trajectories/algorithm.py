"""`TrajectoryAlgorithm`, the base class of algorithms on trajectories, and the inputs and outputs of its loss.

A subclass implements `advantages` and `loss`; docs/algorithms.md shows a complete one in twenty lines.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from palaestra.config import Section, parse_section
from palaestra.experience.trajectory import Trajectory
from palaestra.experience.turn_scoring import TokenLogProbs
from palaestra.learner.trajectories.reward import Rewards

Normaliser: TypeAlias = Literal["tokens", "trajectory", "constant"]
Numbers: TypeAlias = Sequence[float] | npt.NDArray[np.floating]


@dataclass(frozen=True)
class TrainingSample:
    """One turn of an update."""

    turn: int
    """Its index among all turns of the update, trajectory after trajectory."""
    advantage: float
    """Advantage of every token of the turn."""
    weight: float
    """Weight of each of its tokens in the objective."""
    value_target: float | None = None
    """Target of the value at this turn; None if the algorithm learns no values."""


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """A microbatch of B turns of at most G tokens. Tensors are `[B, G]` and 0 where padded, unless noted."""

    proximal: Tensor
    """Log-probabilities before the update."""
    importance: Tensor
    """Importance weight of each token; exactly 1 for tokens of the present version."""
    mask: Tensor
    weight: Tensor
    """Weight of each token in the objective."""
    advantage: Tensor
    """`[B]`"""
    token_share: float
    """1 / number of tokens of the update. A sum weighted by it over all microbatches is a mean over the update."""
    turn_share: float
    """1 / number of turns of the update."""
    reference: Tensor | None = None
    value_target: Tensor | None = None
    """`[B]`"""


class Loss(NamedTuple):
    """The loss of a microbatch, and its contribution to the metrics of the update."""

    total: Tensor
    metrics: Mapping[str, Tensor]
    """By name; summed over the microbatches of an epoch."""


class NoSettings(Section):
    """An algorithm without settings."""


class TrajectoryAlgorithm:
    """Selects and weighs trajectories, and computes a loss."""

    experience: ClassVar[str] = "trajectories"
    config_class: ClassVar[type[Section]] = NoSettings
    """The section of its settings."""
    config: Any
    group_size: int = 1
    """Number of episodes with the same start that are compared; 1: none."""
    supervised: bool = False
    """Whether it imitates the selected episodes: no advantage, no ratio, no correction of stale tokens."""
    from_demonstrations: bool = False
    """Whether it learns from demonstrations alone, and from no episode of a policy."""
    needs_imitation_scores: bool = False
    """Whether the loss reads `is_top` and `mean_log_prob` of each token."""
    needs_values: bool = False
    """Whether it learns a value per turn."""
    needs_entropy: bool = False
    """Whether the loss reads the entropy of each token."""
    needs_reference: bool = False
    """Whether the loss reads the log-probabilities of the policy before training."""
    weight_limit: float = 2.0
    """Maximum importance weight of a stale token."""

    def __init__(self, config: Section | None = None, **settings: Any) -> None:
        self.config = config or parse_section(self.config_class, settings, place="algorithm")

    @classmethod
    def find_defect(cls) -> str:
        """Why this class cannot be trained with; empty if it can."""
        if cls.loss is TrajectoryAlgorithm.loss:
            return "it has no loss(batch, now)"
        if cls.advantages is TrajectoryAlgorithm.advantages and cls.samples is TrajectoryAlgorithm.samples:
            return "it has no advantages(trajectories, rewards)"
        for method in ("select", "advantages", "samples"):
            if "rewards" not in inspect.signature(getattr(cls, method)).parameters:
                return f"its {method} takes no rewards, for each trajectory the reward of each turn"
        return ""

    def advantages(self, trajectories: Sequence[Trajectory], rewards: Rewards) -> Numbers:
        """The advantage of each episode. Required unless `samples` is overridden.

        `rewards` are the training rewards of each turn, which may differ from those of the environment.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither advantages nor samples")

    def loss(self, batch: TokenBatch, now: TokenLogProbs) -> Loss:
        """The contribution of a microbatch to the objective, as a sum over its tokens. Required."""
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    def select(self, group: Sequence[Trajectory], rewards: Rewards) -> Sequence[Trajectory]:
        """The episodes of a complete group to learn from: by default every one without an environment failure.

        Empty if another group should be sampled instead.
        """
        return [one for one in group if one.learnable]

    def samples(
        self, trajectories: Sequence[Trajectory], rewards: Rewards, *, values: Rewards | None = None
    ) -> list[TrainingSample]:
        """The turns to learn from: by default all turns, with the advantages of their episodes."""
        number = count()
        advantages, weights = self.advantages(trajectories, rewards), self.weigh_tokens(trajectories)
        return [
            TrainingSample(next(number), float(advantage), weight)
            for one, advantage, weight in zip(trajectories, advantages, weights, strict=True)
            for _ in one.turns
        ]

    def weigh_tokens(self, trajectories: Sequence[Trajectory]) -> Sequence[float]:
        """The weight of a token of each trajectory, by `config.normaliser`; equal weights if there is none."""
        normaliser: Normaliser = getattr(self.config, "normaliser", "tokens")
        constant = getattr(self.config, "normaliser_tokens", 1.0)
        return token_weights(token_counts(trajectories), normaliser, constant=constant)


def token_counts(trajectories: Sequence[Trajectory]) -> list[int]:
    """Number of sampled tokens of each episode."""
    return [sum(len(turn.token_ids) for turn in one.turns) for one in trajectories]


def token_weights(tokens: Sequence[int], normaliser: Normaliser, *, constant: float = 1.0) -> list[float]:
    """The weight of a token of each of n trajectories, given their numbers of tokens.

    `tokens`: 1 / all tokens of the update; `trajectory`: 1 / (n |tau|); `constant`: 1 / (n k) with one k for the whole
    training. docs/algorithms.md compares their effect on long failures.
    """
    if normaliser == "trajectory":
        return [1.0 / (len(tokens) * own) for own in tokens]
    total = sum(tokens) if normaliser == "tokens" else len(tokens) * constant
    return [1.0 / total for _ in tokens]
