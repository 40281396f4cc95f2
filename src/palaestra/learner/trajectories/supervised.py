"""`Supervised`: imitation of demonstrations by token cross entropy, as a warm start for reinforcement learning.

It learns from nothing but demonstrations: episodes of an oracle or a person, written in the tokens of the model. There
is no advantage, no ratio and no sampling policy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from palaestra.config import Section
from palaestra.errors import ExperienceError
from palaestra.experience.trajectory import Trajectory
from palaestra.experience.turn_scoring import TokenLogProbs
from palaestra.learner.trajectories.algorithm import Loss, Normaliser, TokenBatch, TrajectoryAlgorithm
from palaestra.learner.trajectories.reward import Rewards


class SupervisedConfig(Section):
    """Settings of supervised fine-tuning."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of the target probability that is spread evenly over all tokens. Above 0 the policy stays less certain and
    explores more in reinforcement learning afterwards."""
    normaliser: Normaliser = "tokens"
    """`tokens`: every token has the same weight. `trajectory`: every demonstration has. `constant`: as `tokens`, with a
    step size that does not depend on the lengths of the demonstrations of an update."""
    normaliser_tokens: float = Field(default=256.0, gt=0, le=1e9)
    """k of the `constant` normaliser: about the number of tokens of a demonstration. Half of it doubles the
    gradient."""


class Supervised(TrajectoryAlgorithm):
    """Cross entropy of the demonstrated tokens: `Supervised(label_smoothing=0.1)`."""

    config: SupervisedConfig
    config_class = SupervisedConfig
    supervised = True
    from_demonstrations = True
    needs_imitation_scores = True
    weight_limit = 1.0

    def advantages(self, trajectories: Sequence[Trajectory], rewards: Rewards) -> list[float]:
        """1 for every demonstration."""
        return [1.0] * len(trajectories)

    def loss(self, batch: TokenBatch, now: TokenLogProbs) -> Loss:
        """Cross entropy with label smoothing; `nll` and `token_accuracy` are means over the tokens."""
        smoothing = self.config.label_smoothing
        total = -(batch.weight * now.log_probs).sum()
        if smoothing > 0:
            if now.mean_log_prob is None:
                raise ExperienceError("label_smoothing is above 0 and the policy returned no mean log-probabilities.")
            total = (1.0 - smoothing) * total - smoothing * (batch.weight * now.mean_log_prob).sum()
        with torch.no_grad():
            mean = batch.mask * batch.token_share
            metrics: dict[str, Tensor] = {"policy_loss": total.detach(), "nll": -(mean * now.log_probs).sum()}
            if now.is_top is not None:
                metrics["token_accuracy"] = (mean * now.is_top).sum()
        return Loss(total, metrics)
