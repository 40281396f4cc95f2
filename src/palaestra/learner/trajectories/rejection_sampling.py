"""Rejection sampling: imitate the episodes that earned more than a threshold, and forget the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from palaestra.config import Section, validated
from palaestra.experience.trajectory import Trajectory
from palaestra.experience.turn_input import turn_inputs
from palaestra.learner.trajectories.batch import Loss, Sample, TokenBatch, token_count
from palaestra.learner.trajectories.policy import TokenLogProbs
from palaestra.learner.trajectories.reward import Rewards
from palaestra.learner.trajectories.token_loss import Normaliser, token_weights

__all__ = ["RejectionSampling", "RejectionSamplingConfig"]


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


class RejectionSampling:
    """Maximises the likelihood of accepted episodes: `RejectionSampling(reward_threshold=0.5)`."""

    config_class = RejectionSamplingConfig
    group_size = 1
    supervised = True
    needs_values = False
    needs_entropy = False
    needs_reference = False
    weight_limit = 1.0

    def __init__(self, config: RejectionSamplingConfig | None = None, **settings: Any) -> None:
        self.config = config or validated(RejectionSamplingConfig, settings, place="algorithm")

    def admit(self, group: Sequence[Trajectory], rewards: Rewards) -> list[Trajectory]:
        """Those that earned more than the threshold on a screen that held."""
        return [
            one
            for one, earned in zip(group, rewards, strict=True)
            if one.learnable and float(earned.sum()) > self.config.reward_threshold
        ]

    def samples(
        self, trajectories: Sequence[Trajectory], rewards: Rewards, *, values: Rewards | None = None
    ) -> list[Sample]:
        """Every turn of them, with advantage 1."""
        weights = token_weights(
            [token_count(one) for one in trajectories], self.config.normaliser, constant=self.config.normaliser_tokens
        )
        return [
            Sample(each, 1.0, weight)
            for one, weight in zip(trajectories, weights, strict=True)
            for each in turn_inputs(one)
        ]

    def loss(self, batch: TokenBatch, now: TokenLogProbs) -> Loss:
        """Cross-entropy."""
        loss = -(batch.weight * batch.advantage[:, None] * now.log_probs).sum()
        return Loss(loss, {"policy_loss": loss.detach()})
