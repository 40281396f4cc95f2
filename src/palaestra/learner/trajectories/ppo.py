"""PPO on trajectories: token-level ratios, one value per turn, generalised advantages along the turns.

The value is read where the model has seen the screen and said nothing yet; every token of the answer shares the
advantage of its turn. There is no critic of half-written answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from palaestra.config import validated
from palaestra.errors import ExperienceError
from palaestra.experience.trajectory import Outcome, Trajectory
from palaestra.experience.turn_input import turn_inputs
from palaestra.learner.trajectories.advantage import step_gae
from palaestra.learner.trajectories.batch import Loss, Sample, TokenBatch
from palaestra.learner.trajectories.policy import TokenLogProbs
from palaestra.learner.trajectories.policy_gradient import PolicyGradient, PolicyGradientConfig
from palaestra.learner.trajectories.reward import Rewards

__all__ = ["TrajectoryPPO", "TrajectoryPPOConfig"]


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
    """PPO with a value per environment step."""

    config: TrajectoryPPOConfig
    config_class = TrajectoryPPOConfig
    group_size = 1
    needs_values = True

    def __init__(self, config: TrajectoryPPOConfig | None = None, **settings: Any) -> None:
        self.config = config or validated(TrajectoryPPOConfig, settings, place="algorithm")

    def admit(self, group: Sequence[Trajectory], rewards: Rewards) -> list[Trajectory]:
        """Everything that happened on a screen that held."""
        return [one for one in group if one.learnable]

    def samples(
        self, trajectories: Sequence[Trajectory], rewards: Rewards, *, values: Rewards | None = None
    ) -> list[Sample]:
        """Every turn, with its own advantage and the value it should have had."""
        if values is None:
            raise ExperienceError("PPO: the policy gave no values. It needs a value head.")
        c = self.config
        advantages = [
            self._advantages(one, earned, worth)
            for one, earned, worth in zip(trajectories, rewards, values, strict=True)
        ]
        shift, spread = 0.0, 1.0
        if c.normalize_advantage and sum(len(each) for each in advantages) > 1:
            every = np.concatenate(advantages)
            shift, spread = float(every.mean()), float(every.std()) + 1e-8
        return [
            Sample(each, (float(advantage) - shift) / spread, weight, float(advantage + value))
            for one, weight, found, worth in zip(
                trajectories, self.weights(trajectories), advantages, values, strict=True
            )
            for each, advantage, value in zip(turn_inputs(one), found, worth, strict=True)
        ]

    def _advantages(
        self, trajectory: Trajectory, rewards: npt.NDArray[np.float64], values: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        # Nobody asked for the value of the screen after the last action; the one before it is the nearest there is.
        cut_short = self.config.bootstrap_truncated and trajectory.outcome is Outcome.TRUNCATED
        return step_gae(
            rewards, values, gamma=self.config.gamma,
            gae_lambda=self.config.gae_lambda, last_value=float(values[-1]) if cut_short else 0.0,
        )  # fmt: skip

    def loss(self, batch: TokenBatch, now: TokenLogProbs) -> Loss:
        """Clipped surrogate and squared value error."""
        loss = self.policy_loss(batch, now)
        if now.values is None or batch.value_target is None:
            raise ExperienceError("PPO: the policy gave no values. It needs a value head.")
        value_loss = 0.5 * batch.turn_share * (now.values.float() - batch.value_target).square().sum()
        return Loss(loss.total + self.config.value_coef * value_loss, {**loss.said, "value_loss": value_loss.detach()})
