"""GRPO: an episode is as good as it did better than the others of its group, which began on the same screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from palaestra.config import validated
from palaestra.experience.trajectory import Trajectory
from palaestra.experience.turn_input import turn_inputs
from palaestra.learner.trajectories.advantage import Scale, group_advantages
from palaestra.learner.trajectories.batch import Loss, Sample, TokenBatch
from palaestra.learner.trajectories.policy import TokenLogProbs
from palaestra.learner.trajectories.policy_gradient import PolicyGradient, PolicyGradientConfig
from palaestra.learner.trajectories.reward import Rewards
from palaestra.learner.trajectories.task_key import grouped

__all__ = ["GRPO", "GRPOConfig", "all_alike"]

ALIKE = 1e-8
"""Rewards closer than this are the same: what is left is rounding, and dividing by it would make a signal of noise."""


class GRPOConfig(PolicyGradientConfig):
    """How GRPO learns."""

    group_size: int = Field(default=8, ge=2, le=4096)
    """Episodes per start. Larger groups find a rare success more often and cost as many more sessions per start."""

    scale: Scale = "std"
    """`std` divides by the spread of a group, so every group pushes alike; `none` leaves the reward's own scale."""


class GRPO(PolicyGradient):
    """Group-relative policy optimisation without a value function."""

    config: GRPOConfig
    config_class = GRPOConfig
    needs_values = False

    def __init__(self, config: GRPOConfig | None = None, **settings: Any) -> None:
        self.config = config or validated(GRPOConfig, settings, place="algorithm")

    @property
    def group_size(self) -> int:
        """Episodes per start."""
        return self.config.group_size

    def admit(self, group: Sequence[Trajectory], rewards: Rewards) -> list[Trajectory]:
        """The members whose screen held, unless fewer than two are left or all of them earned the same."""
        members = [(one, earned) for one, earned in zip(group, rewards, strict=True) if one.learnable]
        if len(members) < 2 or all_alike([earned for _, earned in members]):
            return []
        return [one for one, _ in members]

    def samples(
        self, trajectories: Sequence[Trajectory], rewards: Rewards, *, values: Rewards | None = None
    ) -> list[Sample]:
        """Every turn, with the advantage of its episode within its group."""
        advantages: dict[int, float] = {}
        earned = {id(one): float(own.sum()) for one, own in zip(trajectories, rewards, strict=True)}
        for group in grouped(list(trajectories)):
            found = group_advantages([earned[id(one)] for one in group], self.config.scale)
            advantages |= {id(one): float(advantage) for one, advantage in zip(group, found, strict=True)}
        return [
            Sample(each, advantages[id(one)], weight)
            for one, weight in zip(trajectories, self.weights(trajectories), strict=True)
            for each in turn_inputs(one)
        ]

    def loss(self, batch: TokenBatch, now: TokenLogProbs) -> Loss:
        """The surrogate alone."""
        return self.policy_loss(batch, now)


def all_alike(rewards: Rewards) -> bool:
    """Whether episodes with these rewards all earned the same, so that none is better than another."""
    earned = [float(own.sum()) for own in rewards]
    return max(earned) - min(earned) <= ALIKE
