"""The algorithms on trajectories that come with the package: rejection sampling, GRPO and PPO.

Below them stand pure functions of numbers and of tensors `[B, G]` (turns by tokens), and `PolicyGradient`, which puts
them together. Three policies are distinguished as in `learner.ppo`: the *behaviour* policy sampled a token, the
*proximal* one is where this update starts, the *current* one moves. The weight of a token in the sum is decided once
for the whole update, so its microbatches add up to the same gradient, and no average is taken over a part.
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
from palaestra.experience.trajectory import Outcome, TokenLogProbs, Trajectory
from palaestra.learner.returns import gae
from palaestra.learner.trajectories.algorithm import (
    Loss,
    Normaliser,
    Numbers,
    TokenBatch,
    TrainingSample,
    TrajectoryAlgorithm,
)
from palaestra.learner.trajectories.reward import Rewards, all_alike

__all__ = ["GRPO", "PolicyGradient", "PolicyGradientConfig", "RejectionSampling", "TrajectoryPPO"]

Scale: TypeAlias = Literal["std", "none"]
Doubles: TypeAlias = npt.NDArray[np.float64]

LOG_LIMIT = 20.0
"""Log-ratios beyond this are held here: exp(20) is far outside every clip, and exp(90) is infinite."""


def group_advantages(rewards: Numbers, scale: Scale = "std", eps: float = 1e-6) -> Doubles:
    """How much better each episode of a group did: reward minus mean, divided by the (population) spread or not."""
    earned = np.asarray(rewards, np.float64)
    advantage: Doubles = earned - earned.mean()
    if scale == "std":
        advantage = advantage / (earned.std() + eps)
    return advantage


def step_gae(rewards: Numbers, values: Numbers, *, gamma: float, gae_lambda: float, last_value: float = 0.0) -> Doubles:
    """Generalised advantages along the turns of one episode.

    `last_value` is what the future after the last turn is worth: 0 for an episode that ended, the newest value
    estimate for one that was cut short.
    """
    paid, worth = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    if paid.shape != worth.shape or paid.ndim != 1:
        raise ValueError(f"{paid.shape} rewards and {worth.shape} values: each turn needs one of each")
    columns = [torch.from_numpy(column) for column in (paid, worth, np.append(worth[1:], last_value))]
    never = torch.zeros(len(paid), dtype=torch.bool)
    advantage: Doubles = gae(*columns, terminated=never, truncated=never, discount=gamma, lam=gae_lambda).numpy()
    return advantage


def importance_weights(proximal: Tensor, behaviour: Tensor, stale: Tensor, *, limit: float) -> Tensor:
    """min(proximal / behaviour, limit) for stale tokens; exactly 1 for tokens of the proximal policy itself."""
    weight = (proximal - behaviour).clamp(max=LOG_LIMIT).exp().clamp(max=limit)
    return torch.where(stale, weight, torch.ones_like(weight))


class Surrogate(NamedTuple):
    """Per token `[B, G]`: the objective to be raised, and whether the clip holds it, so that it no longer pushes."""

    objective: Tensor
    log_ratio: Tensor
    clipped: Tensor


def surrogate(
    log_probs: Tensor, proximal: Tensor, advantage: Tensor, importance: Tensor, *, clip_low: float, clip_high: float
) -> Surrogate:
    """PPO's clipped objective per token, with the ratio against the proximal policy; `advantage` is `[B]`."""
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
        threshold, pairs = self.config.reward_threshold, zip(group, rewards, strict=True)
        return [one for one, earned in pairs if one.learnable and float(earned.sum()) > threshold]

    def advantages(self, trajectories: Sequence[Trajectory], rewards: Rewards) -> list[float]:
        """Every episode that was accepted counts the same."""
        return [1.0] * len(trajectories)

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
    ) -> list[TrainingSample]:
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
            TrainingSample(next(number), (float(advantage) - shift) / spread, weight, float(advantage + value))
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
