"""The built-in algorithms on trajectories: rejection sampling, GRPO and PPO.

`PolicyGradient` combines pure functions of tensors `[B, G]` (turns by tokens). As in `learner.ppo`, the *behaviour*
policy sampled a token, the *proximal* policy is the one before this update, and the *current* policy is being trained.
Token weights are computed once for the whole update, so that the gradients of its microbatches add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from palaestra.config import Section
from palaestra.errors import ExperienceError
from palaestra.experience.groups import group_positions
from palaestra.experience.trajectory import Outcome, Trajectory
from palaestra.experience.turn_scoring import TokenLogProbs
from palaestra.learner.returns import gae
from palaestra.learner.trajectories.algorithm import (
    Loss,
    Normaliser,
    Numbers,
    TokenBatch,
    TrainingSample,
    TrajectoryAlgorithm,
)
from palaestra.learner.trajectories.reward import Rewards, all_equal

Scale: TypeAlias = Literal["std", "none"]
Doubles: TypeAlias = npt.NDArray[np.float64]

LOG_LIMIT = 20.0
"""Log-ratios are clamped to this: exp(20) is far outside every clip range, and exp(90) overflows."""


def group_advantages(rewards: Numbers, scale: Scale = "std", eps: float = 1e-6) -> Doubles:
    """Reward minus group mean, divided by the population standard deviation if `scale` is `std`."""
    earned = np.asarray(rewards, np.float64)
    advantage: Doubles = earned - earned.mean()
    if scale == "std":
        advantage = advantage / (earned.std() + eps)
    return advantage


def step_gae(rewards: Numbers, values: Numbers, *, gamma: float, gae_lambda: float, last_value: float = 0.0) -> Doubles:
    """Generalised advantage estimates along the turns of one episode.

    `last_value` is the value after the last turn: 0 if the episode ended, the latest estimate if it was truncated.
    """
    reward, value = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    if reward.shape != value.shape or reward.ndim != 1:
        raise ValueError(f"{reward.shape} rewards and {value.shape} values: each turn needs one of each")
    columns = [torch.from_numpy(column) for column in (reward, value, np.append(value[1:], last_value))]
    never = torch.zeros(len(reward), dtype=torch.bool)
    advantage: Doubles = gae(*columns, terminated=never, truncated=never, discount=gamma, lam=gae_lambda).numpy()
    return advantage


def importance_weights(proximal: Tensor, behaviour: Tensor, stale: Tensor, *, limit: float) -> Tensor:
    """min(proximal / behaviour, limit) for stale tokens; exactly 1 for tokens of the proximal policy itself."""
    weight = (proximal - behaviour).clamp(max=LOG_LIMIT).exp().clamp(max=limit)
    return torch.where(stale, weight, torch.ones_like(weight))


class Surrogate(NamedTuple):
    """Per token `[B, G]`: the objective, the log-ratio, and whether the objective is clipped."""

    objective: Tensor
    log_ratio: Tensor
    clipped: Tensor


def surrogate(
    log_probs: Tensor, proximal: Tensor, advantage: Tensor, importance: Tensor, *, clip_low: float, clip_high: float
) -> Surrogate:
    """PPO's clipped objective per token, with the ratio against the proximal policy; `advantage` is `[B]`."""
    log_ratio = (log_probs - proximal).clamp(-LOG_LIMIT, LOG_LIMIT)
    ratio = log_ratio.exp()
    factor = advantage[:, None]
    free, clipped = factor * ratio, factor * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    # The weight is not negative, so it may be applied outside the minimum.
    return Surrogate(importance * torch.min(free, clipped), log_ratio, clipped < free)


def k3(log_probs: Tensor, other: Tensor) -> Tensor:
    """k3 estimate of KL(current || other) per token, on tokens of the current policy; never negative."""
    difference = (other - log_probs).clamp(-LOG_LIMIT, LOG_LIMIT)
    return difference.exp() - difference - 1.0


class PolicyGradientConfig(Section):
    """Settings shared by policy gradients on trajectories."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip range: the ratio of a token is clipped at 1 minus this."""
    clip_high: float = Field(default=0.28, gt=0, le=10)
    """Upper clip range. Larger than `clip_low` lets unlikely tokens grow and preserves entropy."""
    kl_coef: float = Field(default=0.0, ge=0, le=1e6)
    """Weight of the KL penalty towards the policy before training. Preserves general abilities and slows learning."""
    entropy_coef: float = Field(default=0.0, ge=0, le=1e6)
    """Weight of the entropy bonus. Raise it if `entropy` falls to 0 before the task is solved."""
    weight_limit: float = Field(default=2.0, ge=1, le=1e6)
    """Maximum importance weight of a stale token. Higher is less biased and has more variance."""
    normaliser: Normaliser = "tokens"
    """Weighting of tokens of long and short episodes. `trajectory` dilutes long failures; see docs/algorithms.md."""
    normaliser_tokens: float = Field(default=256.0, gt=0, le=1e9)
    """k of the `constant` normaliser: about the number of tokens of an episode. Half of it doubles the gradient."""


class PolicyGradient(TrajectoryAlgorithm):
    """The clipped surrogate, with entropy bonus and KL penalty if configured. A subclass implements `advantages`."""

    config: PolicyGradientConfig
    config_class = PolicyGradientConfig

    def __init__(self, config: Section | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        self.needs_entropy = self.config.entropy_coef > 0
        self.needs_reference = self.config.kl_coef > 0
        self.weight_limit = self.config.weight_limit

    def loss(self, batch: TokenBatch, now: TokenLogProbs) -> Loss:
        """The policy loss of a microbatch, as a sum over its tokens."""
        c = self.config
        clipped = surrogate(
            now.log_probs, batch.proximal, batch.advantage, batch.importance, clip_low=c.clip_low, clip_high=c.clip_high
        )
        policy_loss = -(batch.weight * clipped.objective).sum()
        total = policy_loss
        with torch.no_grad():
            mean = batch.mask * batch.token_share
            metrics: dict[str, Tensor] = {
                "policy_loss": policy_loss.detach(),
                "approx_kl": (mean * (clipped.log_ratio.exp() - 1.0 - clipped.log_ratio)).sum(),
                "clip_fraction": (mean * clipped.clipped).sum(),
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


class RejectionSamplingConfig(Section):
    """Settings of rejection sampling."""

    reward_threshold: float = 0.0
    """An episode is imitated if its return is above this. With rewards of 0 for failure and 1 for success, 0 keeps the
    successes. If no return is above it, nothing is learned, and `accepted_share` is 0."""
    normaliser: Normaliser = "trajectory"
    """`trajectory`: every success has the same weight. `tokens`: every token has, so long episodes weigh more.
    `constant`: as `tokens`, with a step size that does not depend on the lengths of the episodes of an update."""
    normaliser_tokens: float = Field(default=256.0, gt=0, le=1e9)
    """k of the `constant` normaliser: about the number of tokens of an episode. Half of it doubles the gradient."""


class RejectionSampling(TrajectoryAlgorithm):
    """Imitates the episodes that earned more than a threshold: `RejectionSampling(reward_threshold=0.5)`."""

    config: RejectionSamplingConfig
    config_class = RejectionSamplingConfig
    supervised = True
    weight_limit = 1.0

    def select(self, group: Sequence[Trajectory], rewards: Rewards) -> list[Trajectory]:
        """The episodes with a return above the threshold and without an environment failure."""
        threshold, pairs = self.config.reward_threshold, zip(group, rewards, strict=True)
        return [one for one, earned in pairs if one.learnable and float(earned.sum()) > threshold]

    def advantages(self, trajectories: Sequence[Trajectory], rewards: Rewards) -> list[float]:
        """1 for every accepted episode."""
        return [1.0] * len(trajectories)

    def loss(self, batch: TokenBatch, now: TokenLogProbs) -> Loss:
        """Cross-entropy."""
        loss = -(batch.weight * batch.advantage[:, None] * now.log_probs).sum()
        return Loss(loss, {"policy_loss": loss.detach()})


class GRPOConfig(PolicyGradientConfig):
    """Settings of GRPO."""

    group_size: int = Field(default=8, ge=2, le=4096)
    """Episodes per group. Larger groups contain a rare success more often and need more sessions."""
    scale: Scale = "std"
    """`std` divides advantages by the standard deviation of the group; `none` keeps the scale of the reward."""


class GRPO(PolicyGradient):
    """Group-relative policy optimisation: the advantage of an episode is relative to the others of its group."""

    config: GRPOConfig
    config_class = GRPOConfig

    def __init__(self, config: Section | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        self.group_size = self.config.group_size

    def select(self, group: Sequence[Trajectory], rewards: Rewards) -> list[Trajectory]:
        """The members without an environment failure; none if fewer than two are left or all returns are equal."""
        members = [(one, earned) for one, earned in zip(group, rewards, strict=True) if one.learnable]
        if len(members) < 2 or all_equal([earned for _, earned in members]):
            return []
        return [one for one, _ in members]

    def advantages(self, trajectories: Sequence[Trajectory], rewards: Rewards) -> Doubles:
        """The advantage of each episode within its group."""
        earned = np.array([float(own.sum()) for own in rewards])
        advantages = np.zeros(len(trajectories))
        for members in group_positions(trajectories):
            advantages[members] = group_advantages(earned[members], self.config.scale)
        return advantages


class TrajectoryPPOConfig(PolicyGradientConfig):
    """Settings of PPO on trajectories."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount factor per turn. Below 1, an early success is worth more."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Between one-step bootstrapping (0: biased, low variance) and full returns (1: unbiased, high variance)."""
    bootstrap_truncated: bool = False
    """Value after an episode that reached its step limit. False: 0, the limit is part of the task. True: the value of
    the last turn; right for limits that only save time, but an agent that idles until the limit is not penalised."""
    normalize_advantage: bool = True
    """Normalise the advantages of an update to mean 0 and variance 1."""
    value_coef: float = Field(default=0.5, ge=0, le=1e6)
    """Weight of the value loss."""


class TrajectoryPPO(PolicyGradient):
    """PPO with token-level ratios, one value per turn, and generalised advantages along the turns.

    The value is read at the last prompt token; every token of the reply has the advantage of its turn.
    """

    config: TrajectoryPPOConfig
    config_class = TrajectoryPPOConfig
    needs_values = True

    def samples(
        self, trajectories: Sequence[Trajectory], rewards: Rewards, *, values: Rewards | None = None
    ) -> list[TrainingSample]:
        """Every turn, with its own advantage and value target."""
        if values is None:
            raise ExperienceError("PPO: the policy returned no values. It needs a value head.")
        advantages = [self._compute_advantages(*episode) for episode in zip(trajectories, rewards, values, strict=True)]
        shift, spread = 0.0, 1.0
        if self.config.normalize_advantage and sum(len(each) for each in advantages) > 1:
            every = np.concatenate(advantages)
            shift, spread = float(every.mean()), float(every.std()) + 1e-8
        number = count()
        return [
            TrainingSample(next(number), (float(advantage) - shift) / spread, weight, float(advantage + value))
            for weight, own, worth in zip(self.weigh_tokens(trajectories), advantages, values, strict=True)
            for advantage, value in zip(own, worth, strict=True)
        ]

    def _compute_advantages(self, trajectory: Trajectory, rewards: Doubles, values: Doubles) -> Doubles:
        c = self.config
        # The value of the screen after the last action is not known; that of the last turn is the closest.
        is_truncated = c.bootstrap_truncated and trajectory.outcome is Outcome.TRUNCATED
        last_value = float(values[-1]) if is_truncated else 0.0
        return step_gae(rewards, values, gamma=c.gamma, gae_lambda=c.gae_lambda, last_value=last_value)

    def loss(self, batch: TokenBatch, now: TokenLogProbs) -> Loss:
        """Clipped surrogate loss and squared value error."""
        loss = super().loss(batch, now)
        if now.values is None or batch.value_target is None:
            raise ExperienceError("PPO: the policy returned no values. It needs a value head.")
        value_loss = 0.5 * batch.turn_share * (now.values.float() - batch.value_target).square().sum()
        metrics = {**loss.metrics, "value_loss": value_loss.detach()}
        return Loss(loss.total + self.config.value_coef * value_loss, metrics)
