"""Policy gradients on tokens: advantages, the clipped surrogate, stale tokens, the pull towards a reference.

Pure functions of numbers and of tensors `[B, G]` (turns by tokens), and `PolicyGradient`, which puts them together.
Three policies are told apart as in `learner.off_policy`: the *behaviour* policy sampled a token, the *proximal* one is
where this update starts, the *current* one moves. The weight of a token in the sum is decided once for the whole
update, so cutting the update into microbatches adds up to the same gradient, and no average is taken over a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from palaestra.config import Section
from palaestra.errors import ExperienceError
from palaestra.experience.trajectory import TokenLogProbs, Trajectory
from palaestra.learner.trajectories.algorithm import (
    Loss,
    Normaliser,
    Numbers,
    TokenBatch,
    TrajectoryAlgorithm,
    token_counts,
    token_weights,
)
from palaestra.learner.trajectories.reward import Rewards

__all__ = [
    "PolicyGradient",
    "PolicyGradientConfig",
    "Scale",
    "Surrogate",
    "all_alike",
    "group_advantages",
    "importance_weights",
    "k3",
    "step_gae",
    "surrogate",
]

Scale: TypeAlias = Literal["std", "none"]
Doubles: TypeAlias = npt.NDArray[np.float64]

LOG_LIMIT = 20.0
"""Log-ratios beyond this are held here: exp(20) is far outside every clip, and exp(90) is infinite."""

ALIKE = 1e-8
"""Rewards closer than this are the same: what is left is rounding, and dividing by it would make a signal of noise."""


def group_advantages(rewards: Numbers, scale: Scale = "std", eps: float = 1e-6) -> Doubles:
    """How much better each episode of a group did than the group: reward minus mean, divided by the spread or not.

    The spread is that of the group itself (population). `none` keeps hard and easy groups on the scale of the reward;
    `std` makes every group count alike, so a group with one lucky episode in eight pushes as hard as a mixed one.
    """
    earned = np.asarray(rewards, np.float64)
    advantage: Doubles = earned - earned.mean()
    if scale == "std":
        advantage = advantage / (earned.std() + eps)
    return advantage


def all_alike(rewards: Rewards) -> bool:
    """Whether episodes with these rewards all earned the same, so that none is better than another."""
    earned = [float(own.sum()) for own in rewards]
    return max(earned) - min(earned) <= ALIKE


def step_gae(rewards: Numbers, values: Numbers, *, gamma: float, gae_lambda: float, last_value: float = 0.0) -> Doubles:
    """Generalised advantages along the turns of one episode.

    `last_value` is what the future after the last turn is worth: 0 for an episode that ended, the newest value
    estimate for one that was cut short.
    """
    paid, worth = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    if paid.shape != worth.shape or paid.ndim != 1:
        raise ValueError(f"{paid.shape} rewards and {worth.shape} values: each turn needs one of each")
    following = np.append(worth[1:], last_value)
    surprise = paid + gamma * following - worth
    advantage = np.empty_like(surprise)
    carry = 0.0
    for t in reversed(range(len(surprise))):
        carry = surprise[t] + gamma * gae_lambda * carry
        advantage[t] = carry
    return advantage


def importance_weights(proximal: Tensor, behaviour: Tensor, stale: Tensor, *, limit: float) -> Tensor:
    """min(proximal / behaviour, limit) for stale tokens; exactly 1 for tokens of the proximal policy itself."""
    weight = (proximal - behaviour).clamp(max=LOG_LIMIT).exp().clamp(max=limit)
    return torch.where(stale, weight, torch.ones_like(weight))


class Surrogate(NamedTuple):
    """The clipped objective of each token, and what there is to say about it."""

    objective: Tensor
    """`[B, G]`, to be raised."""
    log_ratio: Tensor
    clipped: Tensor
    """`[B, G]` bool: the clip holds this token, and it no longer pushes."""


def surrogate(
    log_probs: Tensor, proximal: Tensor, advantage: Tensor, importance: Tensor, *, clip_low: float, clip_high: float
) -> Surrogate:
    """PPO's clipped objective per token, with the ratio against the proximal policy.

    `advantage` is `[B]`. `clip_high` above `clip_low` (clip-higher) lets a token that was unlikely grow further before
    it is held, which keeps exploration alive.
    """
    log_ratio = (log_probs - proximal).clamp(-LOG_LIMIT, LOG_LIMIT)
    ratio = log_ratio.exp()
    push = advantage[:, None]
    free, held = push * ratio, push * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    # Never negative, so the weight may stand outside the minimum.
    return Surrogate(importance * torch.min(free, held), log_ratio, held < free)


def k3(log_probs: Tensor, other: Tensor) -> Tensor:
    """KL(current || other) estimated on the current policy's tokens, one number per token, never negative."""
    difference = (other - log_probs).clamp(-LOG_LIMIT, LOG_LIMIT)
    return difference.exp() - difference - 1.0


class PolicyGradientConfig(Section):
    """The settings of every policy gradient on trajectories."""

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


class PolicyGradient(TrajectoryAlgorithm):
    """The clipped surrogate, with the pulls that are switched on; a subclass writes `advantages`."""

    config: PolicyGradientConfig
    config_class = PolicyGradientConfig

    def __init__(self, config: Section | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        self.needs_entropy = self.config.entropy_coef > 0
        self.needs_reference = self.config.kl_coef > 0
        self.weight_limit = self.config.weight_limit

    def weigh_tokens(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """By the configured normaliser."""
        c = self.config
        return token_weights(token_counts(trajectories), c.normaliser, constant=c.normaliser_tokens)

    def loss(self, batch: TokenBatch, now: TokenLogProbs) -> Loss:
        """The policy's part of the objective on a microbatch, as a sum over its tokens."""
        c = self.config
        found = surrogate(
            now.log_probs, batch.proximal, batch.advantage, batch.importance, clip_low=c.clip_low, clip_high=c.clip_high
        )
        policy_loss = -(batch.weight * found.objective).sum()
        total = policy_loss
        with torch.no_grad():
            mean = batch.mask * batch.token_share
            metrics: dict[str, Tensor] = {
                "policy_loss": policy_loss.detach(),
                "approx_kl": (mean * (found.log_ratio.exp() - 1.0 - found.log_ratio)).sum(),
                "clip_fraction": (mean * found.clipped).sum(),
            }
        if c.entropy_coef > 0:
            if now.entropy is None:
                raise ExperienceError("entropy_coef is above 0 and the policy returned no entropy of its tokens.")
            total = total - c.entropy_coef * (batch.weight * now.entropy).sum()
        if c.kl_coef > 0:
            if batch.reference is None:
                raise ExperienceError("kl_coef is above 0 and the policy keeps no weights from before training.")
            distance = k3(now.log_probs, batch.reference)
            total = total + c.kl_coef * (batch.weight * distance).sum()
            metrics["reference_kl"] = (mean * distance.detach()).sum()
        return Loss(total, metrics)
