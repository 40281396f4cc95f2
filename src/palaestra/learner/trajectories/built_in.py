"""The algorithms on trajectories that come with the package: rejection sampling, GRPO and PPO."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
from pydantic import Field

from palaestra.config import Section
from palaestra.errors import ExperienceError
from palaestra.experience.groups import group_positions
from palaestra.experience.trajectory import Outcome, TokenLogProbs, Trajectory
from palaestra.learner.trajectories.algorithm import (
    Loss,
    Normaliser,
    Sample,
    TokenBatch,
    TrajectoryAlgorithm,
    token_counts,
    token_weights,
)
from palaestra.learner.trajectories.policy_gradient import (
    Doubles,
    PolicyGradient,
    PolicyGradientConfig,
    Scale,
    all_alike,
    group_advantages,
    step_gae,
)
from palaestra.learner.trajectories.reward import Rewards

__all__ = [
    "GRPO",
    "GRPOConfig",
    "RejectionSampling",
    "RejectionSamplingConfig",
    "TrajectoryPPO",
    "TrajectoryPPOConfig",
]


class RejectionSamplingConfig(Section):
    """How rejection sampling learns."""

    reward_threshold: float = 0.0
    """An episode is imitated when it earned strictly more than this in all. With rewards of 0 for failure and 1 for
    success, 0 keeps the successes; above what is ever earned, nothing is learned, and `accepted_share` is 0."""
    normaliser: Normaliser = "trajectory"
    """`trajectory`: every success counts alike, however long. `tokens`: every token does, so long episodes weigh more.
    `constant`: as `tokens`, with a step that does not depend on how long the episodes of an update happen to be."""
    normaliser_tokens: float = Field(default=256.0, gt=0, le=1e9)
    """k of the `constant` normaliser: about how many tokens an episode has. Half of it doubles the gradient."""


class RejectionSampling(TrajectoryAlgorithm):
    """Imitates the episodes that earned more than a threshold: `RejectionSampling(reward_threshold=0.5)`."""

    config: RejectionSamplingConfig
    config_class = RejectionSamplingConfig
    supervised = True
    weight_limit = 1.0

    def select(self, group: Sequence[Trajectory], rewards: Rewards) -> list[Trajectory]:
        """Those that earned more than the threshold on a screen that held."""
        threshold = self.config.reward_threshold
        return [
            one for one, earned in zip(group, rewards, strict=True) if one.learnable and float(earned.sum()) > threshold
        ]

    def advantages(self, trajectories: Sequence[Trajectory], rewards: Rewards) -> list[float]:
        """Every episode that was accepted counts the same."""
        return [1.0] * len(trajectories)

    def weigh_tokens(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """By the configured normaliser."""
        c = self.config
        return token_weights(token_counts(trajectories), c.normaliser, constant=c.normaliser_tokens)

    def loss(self, batch: TokenBatch, now: TokenLogProbs) -> Loss:
        """Cross-entropy."""
        loss = -(batch.weight * batch.advantage[:, None] * now.log_probs).sum()
        return Loss(loss, {"policy_loss": loss.detach()})


class GRPOConfig(PolicyGradientConfig):
    """How GRPO learns."""

    group_size: int = Field(default=8, ge=2, le=4096)
    """Episodes per start. Larger groups find a rare success more often and cost as many more sessions per start."""
    scale: Scale = "std"
    """`std` divides by the spread of a group, so every group pushes alike; `none` leaves the reward's own scale."""


class GRPO(PolicyGradient):
    """Group-relative policy optimisation: an episode is as good as it did better than the others of its group."""

    config: GRPOConfig
    config_class = GRPOConfig

    def __init__(self, config: Section | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        self.group_size = self.config.group_size

    def select(self, group: Sequence[Trajectory], rewards: Rewards) -> list[Trajectory]:
        """The members whose screen held, unless fewer than two are left or all of them earned the same."""
        members = [(one, earned) for one, earned in zip(group, rewards, strict=True) if one.learnable]
        if len(members) < 2 or all_alike([earned for _, earned in members]):
            return []
        return [one for one, _ in members]

    def advantages(self, trajectories: Sequence[Trajectory], rewards: Rewards) -> Doubles:
        """Of each episode within its group."""
        earned = np.array([float(own.sum()) for own in rewards])
        advantages = np.zeros(len(trajectories))
        for members in group_positions(trajectories):
            advantages[members] = group_advantages(earned[members], self.config.scale)
        return advantages


class TrajectoryPPOConfig(PolicyGradientConfig):
    """How PPO learns from trajectories."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per turn. Below 1 a success is worth more the sooner it comes."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Between trusting the value of the next turn (0: biased, calm) and the whole return (1: unbiased, noisy)."""
    bootstrap_truncated: bool = False
    """What an episode that ran into its step limit is told. False: the limit belongs to the task and dawdling earned
    what it earned. True: the future is worth what the last turn was believed to be worth; right for limits that only
    save time, but an agent that idles until the limit then never hears of it."""
    normalize_advantage: bool = True
    """Give the advantages of an update mean 0 and variance 1, so that the step does not depend on reward scale."""
    value_coef: float = Field(default=0.5, ge=0, le=1e6)
    """Weight of the value error against the policy objective."""


class TrajectoryPPO(PolicyGradient):
    """PPO with token-level ratios, one value per turn and generalised advantages along the turns.

    The value is read where the model has seen the screen and said nothing yet; every token of the answer shares the
    advantage of its turn. There is no critic of half-written answers.
    """

    config: TrajectoryPPOConfig
    config_class = TrajectoryPPOConfig
    needs_values = True

    def samples(
        self, trajectories: Sequence[Trajectory], rewards: Rewards, *, values: Rewards | None = None
    ) -> list[Sample]:
        """Every turn, with its own advantage and the value it should have had."""
        if values is None:
            raise ExperienceError("PPO: the policy gave no values. It needs a value head.")
        advantages = [self._along_turns(*episode) for episode in zip(trajectories, rewards, values, strict=True)]
        shift, spread = 0.0, 1.0
        if self.config.normalize_advantage and sum(len(each) for each in advantages) > 1:
            every = np.concatenate(advantages)
            shift, spread = float(every.mean()), float(every.std()) + 1e-8
        number = count()
        return [
            Sample(next(number), (float(advantage) - shift) / spread, weight, float(advantage + value))
            for weight, own, worth in zip(self.weigh_tokens(trajectories), advantages, values, strict=True)
            for advantage, value in zip(own, worth, strict=True)
        ]

    def _along_turns(self, trajectory: Trajectory, rewards: Doubles, values: Doubles) -> Doubles:
        c = self.config
        # Nobody asked for the value of the screen after the last action; the one before it is the nearest there is.
        cut_short = c.bootstrap_truncated and trajectory.outcome is Outcome.TRUNCATED
        last_value = float(values[-1]) if cut_short else 0.0
        return step_gae(rewards, values, gamma=c.gamma, gae_lambda=c.gae_lambda, last_value=last_value)

    def loss(self, batch: TokenBatch, now: TokenLogProbs) -> Loss:
        """Clipped surrogate and squared value error."""
        loss = super().loss(batch, now)
        if now.values is None or batch.value_target is None:
            raise ExperienceError("PPO: the policy gave no values. It needs a value head.")
        value_loss = 0.5 * batch.turn_share * (now.values.float() - batch.value_target).square().sum()
        metrics = {**loss.metrics, "value_loss": value_loss.detach()}
        return Loss(loss.total + self.config.value_coef * value_loss, metrics)
