"""What GRPO and PPO share: clipped surrogate, entropy bonus, pull towards the reference, and their settings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from palaestra.config import Section
from palaestra.errors import ExperienceError
from palaestra.experience.trajectory import Trajectory
from palaestra.learner.trajectories.batch import Loss, TokenBatch, token_count
from palaestra.learner.trajectories.policy import TokenLogProbs
from palaestra.learner.trajectories.token_loss import Normaliser, k3, surrogate, token_weights

__all__ = ["PolicyGradient", "PolicyGradientConfig", "policy_gradient_loss"]


class PolicyGradientConfig(Section):
    """What every policy gradient on trajectories can be told."""

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


class PolicyGradient:
    """What the trainer asks of every policy gradient; advantages are each algorithm's own."""

    config: PolicyGradientConfig
    supervised = False

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

    def weights(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """What a token of each trajectory counts in the update."""
        c = self.config
        return list(
            token_weights([token_count(one) for one in trajectories], c.normaliser, constant=c.normaliser_tokens)
        )

    def policy_loss(self, batch: TokenBatch, now: TokenLogProbs) -> Loss:
        """Clipped surrogate, with the pulls that are switched on."""
        c = self.config
        return policy_gradient_loss(
            batch, now, clip_low=c.clip_low, clip_high=c.clip_high, entropy_coef=c.entropy_coef, kl_coef=c.kl_coef
        )


def policy_gradient_loss(
    batch: TokenBatch,
    now: TokenLogProbs,
    *,
    clip_low: float,
    clip_high: float,
    entropy_coef: float = 0.0,
    kl_coef: float = 0.0,
) -> Loss:
    """The policy's part of the objective on a microbatch, as a sum over its tokens."""
    found = surrogate(
        now.log_probs, batch.proximal, batch.advantage, batch.importance, clip_low=clip_low, clip_high=clip_high
    )
    policy_loss = -(batch.weight * found.objective).sum()
    total = policy_loss
    with torch.no_grad():
        mean = batch.mask * batch.token_share
        said: dict[str, Tensor] = {
            "policy_loss": policy_loss.detach(),
            "approx_kl": (mean * (found.log_ratio.exp() - 1.0 - found.log_ratio)).sum(),
            "clip_fraction": (mean * found.clipped).sum(),
        }
    if entropy_coef > 0:
        if now.entropy is None:
            raise ExperienceError("entropy_coef is above 0 and the policy returned no entropy of its tokens.")
        total = total - entropy_coef * (batch.weight * now.entropy).sum()
    if kl_coef > 0:
        if batch.reference is None:
            raise ExperienceError("kl_coef is above 0 and the policy keeps no weights from before training.")
        distance = k3(now.log_probs, batch.reference)
        total = total + kl_coef * (batch.weight * distance).sum()
        said["reference_kl"] = (mean * distance.detach()).sum()
    return Loss(total, said)
