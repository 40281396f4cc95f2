"""`TrajectoryAlgorithm`: what to learn from and what to minimise, and the numbers that a loss reads and returns.

A subclass writes two methods, `advantages` and `loss`; docs/algorithms.md shows a whole one in twenty lines.
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
from palaestra.experience.trajectory import TokenLogProbs, Trajectory
from palaestra.learner.trajectories.reward import Rewards

__all__ = ["Loss", "Normaliser", "Numbers", "TokenBatch", "TrainingSample", "TrajectoryAlgorithm", "token_counts"]

Normaliser: TypeAlias = Literal["tokens", "trajectory", "constant"]
Numbers: TypeAlias = Sequence[float] | npt.NDArray[np.floating]


@dataclass(frozen=True)
class TrainingSample:
    """One turn to learn from."""

    turn: int
    """Its position among all turns of the update, trajectory after trajectory."""
    advantage: float
    """Of every token of the turn."""
    weight: float
    """Of each of its tokens in the sum that is the objective."""
    value_target: float | None = None
    """What the value at this turn should have been; None when there is no value."""


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """A microbatch of B turns, the longest of which has G tokens."""

    proximal: Tensor
    """`[B, G]`, as all the following unless they say otherwise; 0 where padded. Log-probabilities before the update."""
    importance: Tensor
    """Weight of each token for being stale; exactly 1 for tokens of the present version."""
    mask: Tensor
    weight: Tensor
    """0 where padded: a sum over it is a sum over tokens."""
    advantage: Tensor
    """`[B]`"""
    token_share: float
    """1 / the tokens of the whole update: sums of it over all microbatches are means over the update."""
    turn_share: float
    """1 / the turns of the whole update."""
    reference: Tensor | None = None
    value_target: Tensor | None = None
    """`[B]`"""


class Loss(NamedTuple):
    """What to minimise on a microbatch, and its part of what is reported about the update."""

    total: Tensor
    metrics: Mapping[str, Tensor]
    """By name; parts of one epoch are added up."""


class NoSettings(Section):
    """An algorithm without settings."""


class TrajectoryAlgorithm:
    """Decides what to learn from and what to minimise; knows no screen, no queue and no file."""

    experience: ClassVar[str] = "trajectories"
    config_class: ClassVar[type[Section]] = NoSettings
    """The section that its settings are checked against."""
    config: Any
    group_size: int = 1
    """How many episodes of the same start are compared; 1: none."""
    supervised: bool = False
    """Whether it raises the likelihood of what it selects: no advantage, no ratio, no correction of stale tokens."""
    needs_values: bool = False
    """Whether it learns a value per turn."""
    needs_entropy: bool = False
    """Whether the loss reads the entropy of each token."""
    needs_reference: bool = False
    """Whether the loss reads what the policy said before training."""
    weight_limit: float = 2.0
    """The most a stale token may count."""

    def __init__(self, config: Section | None = None, **settings: Any) -> None:
        self.config = config or parse_section(self.config_class, settings, place="algorithm")

    @classmethod
    def find_defect(cls) -> str:
        """Why the class cannot be trained with; empty when it can."""
        if cls.loss is TrajectoryAlgorithm.loss:
            return "it has no loss(batch, now)"
        if cls.advantages is TrajectoryAlgorithm.advantages and cls.samples is TrajectoryAlgorithm.samples:
            return "it has no advantages(trajectories, rewards)"
        for method in ("select", "advantages", "samples"):
            if "rewards" not in inspect.signature(getattr(cls, method)).parameters:
                return f"its {method} takes no rewards, for each trajectory the reward of each turn"
        return ""

    def advantages(self, trajectories: Sequence[Trajectory], rewards: Rewards) -> Numbers:
        """How much better than expected each episode was; to be written, unless `samples` is.

        `rewards` are what each turn earns for learning, which is not always what the environment paid.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither advantages nor samples")

    def loss(self, batch: TokenBatch, now: TokenLogProbs) -> Loss:
        """What a microbatch contributes to the objective, as a sum over its tokens; to be written."""
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    def select(self, group: Sequence[Trajectory], rewards: Rewards) -> Sequence[Trajectory]:
        """What of a complete group is worth learning from: by default every episode whose screen held.

        Nothing when another group should be sampled instead.
        """
        return [one for one in group if one.learnable]

    def samples(
        self, trajectories: Sequence[Trajectory], rewards: Rewards, *, values: Rewards | None = None
    ) -> list[TrainingSample]:
        """The turns to learn from: by default all, with the advantages of their episodes."""
        number = count()
        advantages, weights = self.advantages(trajectories, rewards), self.weigh_tokens(trajectories)
        return [
            TrainingSample(next(number), float(advantage), weight)
            for one, advantage, weight in zip(trajectories, advantages, weights, strict=True)
            for _ in one.turns
        ]

    def weigh_tokens(self, trajectories: Sequence[Trajectory]) -> Sequence[float]:
        """What a token of each trajectory counts: by the `normaliser` of the settings, alike when they have none."""
        normaliser: Normaliser = getattr(self.config, "normaliser", "tokens")
        constant = getattr(self.config, "normaliser_tokens", 1.0)
        return token_weights(token_counts(trajectories), normaliser, constant=constant)


def token_counts(trajectories: Sequence[Trajectory]) -> list[int]:
    """How many tokens were sampled in each episode."""
    return [sum(len(turn.token_ids) for turn in one.turns) for one in trajectories]


def token_weights(tokens: Sequence[int], normaliser: Normaliser, *, constant: float = 1.0) -> list[float]:
    """How much each token of every trajectory counts, given how many tokens each trajectory has.

    `tokens`: 1 / all tokens of the update; `trajectory`: 1 / (n |tau|); `constant`: 1 / (n k) with one k for the whole
    training. docs/algorithms.md says what each does to long failures.
    """
    if normaliser == "trajectory":
        return [1.0 / (len(tokens) * own) for own in tokens]
    total = sum(tokens) if normaliser == "tokens" else len(tokens) * constant
    return [1.0 / total for _ in tokens]
