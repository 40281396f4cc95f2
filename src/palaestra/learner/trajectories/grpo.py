"""GRPO: an episode is as good as it did better than the others of its group, which began on the same screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from palaestra.config import Section, validated
from palaestra.experience.trajectory import Trajectory
from palaestra.experience.turn_input import turn_inputs
from palaestra.learner.trajectories.advantage import Scale, group_advantages
from palaestra.learner.trajectories.batch import Loss, Sample, TokenBatch, token_count
from palaestra.learner.trajectories.policy import TokenLogProbs
from palaestra.learner.trajectories.policy_gradient import policy_gradient_loss
from palaestra.learner.trajectories.task_key import grouped
from palaestra.learner.trajectories.token_loss import Normaliser, token_weights

__all__ = ["GRPO", "GRPOConfig", "all_alike"]

ALIKE = 1e-8
"""Rewards closer than this are the same: what is left is rounding, and dividing by it would make a signal of noise."""


class GRPOConfig(Section):
    """How GRPO learns."""

    group_size: int = Field(default=8, ge=2, le=4096)
    """Episodes per start. Larger groups find a rare success more often and cost as many more sessions per start."""

    scale: Scale = "std"
    """`std` divides by the spread of a group, so every group pushes alike; `none` leaves the reward's own scale."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far below 1 the ratio of a token may fall before it stops being pushed down."""

    clip_high: float = Field(default=0.28, gt=0, le=10)
    """How far above 1 it may rise. Above `clip_low`, unlikely tokens may grow and entropy lasts longer."""

    kl_coef: float = Field(default=0.0, ge=0, le=1e6)
    """Pull towards the policy from before training. Holds general abilities, and holds learning back."""

    entropy_coef: float = Field(default=0.0, ge=0, le=1e6)
    """Reward for staying undecided. Raise it when `entropy` falls to 0 before the task is solved."""

    weight_limit: float = Field(default=2.0, ge=1, le=1e6)
    """The most a token of older weights may count. Higher is less biased and noisier."""

    normaliser: Normaliser = "tokens"
    """How tokens of long and short episodes compare. `trajectory` dilutes long failures; see docs/algorithms.md."""

    normaliser_tokens: float = Field(default=256.0, gt=0, le=1e9)
    """k of the `constant` normaliser: about how many tokens an episode has. Half of it doubles the gradient."""


class GRPO:
    """Group-relative policy optimisation without a value function."""

    config_class = GRPOConfig
    supervised = False
    needs_values = False

    def __init__(self, config: GRPOConfig | None = None, **settings: Any) -> None:
        self.config = config or validated(GRPOConfig, settings, place="algorithm")

    @property
    def group_size(self) -> int:
        """Episodes per start."""
        return self.config.group_size

    @property
    def needs_entropy(self) -> bool:
        """Only to reward it."""
        return self.config.entropy_coef > 0

    @property
    def needs_reference(self) -> bool:
        """Only to stay near it."""
        return self.config.kl_coef > 0

    @property
    def weight_limit(self) -> float:
        """The most a stale token may count."""
        return self.config.weight_limit

    def admit(self, group: Sequence[Trajectory]) -> list[Trajectory]:
        """The members whose screen held, unless fewer than two are left or all of them earned the same."""
        members = [one for one in group if one.learnable]
        return [] if len(members) < 2 or all_alike(members) else members

    def samples(
        self, trajectories: Sequence[Trajectory], *, values: Sequence[npt.NDArray[np.float64]] | None = None
    ) -> list[Sample]:
        """Every turn, with the advantage of its episode within its group."""
        weights = token_weights(
            [token_count(one) for one in trajectories], self.config.normaliser, constant=self.config.normaliser_tokens
        )
        advantages: dict[int, float] = {}
        for group in grouped(list(trajectories)):
            found = group_advantages([one.total_reward() for one in group], self.config.scale)
            advantages |= {id(one): float(advantage) for one, advantage in zip(group, found, strict=True)}
        return [
            Sample(each, advantages[id(one)], weight)
            for one, weight in zip(trajectories, weights, strict=True)
            for each in turn_inputs(one)
        ]

    def loss(self, batch: TokenBatch, now: TokenLogProbs) -> Loss:
        """Clipped surrogate, with the pulls that are switched on."""
        c = self.config
        return policy_gradient_loss(
            batch, now, clip_low=c.clip_low, clip_high=c.clip_high, entropy_coef=c.entropy_coef, kl_coef=c.kl_coef
        )


def all_alike(group: Sequence[Trajectory]) -> bool:
    """Whether all of them earned the same, so that none is better than another."""
    earned = [one.total_reward() for one in group]
    return max(earned) - min(earned) <= ALIKE
