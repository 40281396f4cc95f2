"""Proximal policy optimisation: what it learns from (`prepare`) and what it minimises (`losses`).

This is the algorithm as one reads it; `learner.update` runs it on any policy, and `learner.compiled` runs the same
arithmetic without dispatch for small networks. docs/algorithms.md says why each detail is as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from palaestra.experience.columns import Columns
from palaestra.learner.adam import Adam
from palaestra.learner.algorithm import CompiledUpdate, Losses, RolloutAlgorithm, RolloutConfig, remaining
from palaestra.learner.batch import TrainBatch, evaluate_actions, flatten_rollout
from palaestra.learner.compiled import CompiledPPO, compiled_gae, compiled_vtrace
from palaestra.learner.off_policy import reevaluate
from palaestra.learner.returns import explained_variance, gae, scale_reward, vtrace
from palaestra.policy.compiled import CompiledActorCritic

__all__ = ["PPO", "PPOConfig"]


class PPOConfig(RolloutConfig):
    """How PPO learns."""

    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Between one-step bootstrapping (0: biased, calm) and whole returns (1: unbiased, noisy)."""
    clip_range: float = Field(default=0.2, gt=0, lt=1)
    """Half-width of the interval around ratio 1 where a sample still pushes. Wider learns faster and breaks sooner."""
    clip_range_schedule: Literal["constant", "linear"] = "constant"
    """`linear` narrows the interval to 0 at the end of training."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """How far a value may move from its old estimate per rollout. null: not limited. See docs/algorithms.md."""
    normalize_advantage: bool = True
    """Give each minibatch advantages of mean 0 and variance 1, so that the step does not depend on reward scale."""
    entropy_coef: float = Field(default=0.01, ge=0, le=1e6)
    """Reward for staying undecided. Raise it when `entropy` falls to 0 before the task is solved."""
    value_coef: float = Field(default=0.5, ge=0, le=1e6)
    """Weight of the value error against the policy objective."""
    target_kl: float | None = Field(default=None, gt=0)
    """Stop improving the policy (not the value) on this rollout once a minibatch's KL exceeds 1.5 times this."""
    correction: Literal["none", "decoupled", "vtrace"] = "decoupled"
    """For experience of older weights: `decoupled` clips around today's policy and weighs each sample by how likely
    that policy was to act so; `vtrace` cuts the traces of unlikely actions as well; `none` is plain PPO. Fresh
    experience is learned from alike, bit for bit. See docs/async.md."""
    weight_limit: float = Field(default=10.0, ge=1, le=1e6)
    """`decoupled`: the most a sample of older weights may count. Higher is less biased and noisier; at 2 a policy that
    moves fast loses a tenth of its weight, and learns worse (docs/benchmarks.md)."""
    rho_bar: float = Field(default=1.0, gt=0, le=1e6)
    """`vtrace`: limit of the weight of a step's own surprise, and of its sample in the objective."""
    c_bar: float = Field(default=1.0, gt=0, le=1e6)
    """`vtrace`: limit of the weight that passes later surprises back."""

    @model_validator(mode="after")
    def _traces_are_no_heavier_than_steps(self) -> PPOConfig:
        if self.c_bar > self.rho_bar:
            raise ValueError(f"c_bar {self.c_bar:g} is above rho_bar {self.rho_bar:g}; V-trace needs c_bar <= rho_bar")
        return self


class PPO(RolloutAlgorithm):
    """PPO with clipped surrogate objective, clipped value error and entropy bonus."""

    config_class = PPOConfig
    config: PPOConfig

    def prepare(self, rollout: Columns, advantage: Tensor | None = None, target: Tensor | None = None) -> TrainBatch:
        """Advantages and value targets, unless given, beside the flattened rollout."""
        if advantage is None:
            advantage = self.advantages(rollout)
        target = advantage + rollout["value"] if target is None else target
        return flatten_rollout(rollout, advantage=advantage, target=target)

    def advantages(self, rollout: Columns) -> Tensor:
        """Generalised advantages `[T, N]`."""
        return gae(scale_reward(rollout), **_trace(rollout), **self._discounts())

    def losses(self, policy: Any, batch: TrainBatch, *, clip_range: float) -> Losses:
        """The objective on one minibatch."""
        c = self.config
        log_prob, entropy, value = evaluate_actions(policy, batch)
        advantage = batch["advantage"]
        if c.normalize_advantage and len(advantage) > 1:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        if "weight" in batch:
            # Never negative, so it may stand inside the minimum: w * min(a, b) = min(w * a, w * b).
            advantage = advantage * batch["weight"]
        log_ratio = log_prob - batch["log_prob"]
        ratio = log_ratio.exp()
        surrogate = torch.min(advantage * ratio, advantage * ratio.clamp(1 - clip_range, 1 + clip_range))
        policy_loss = -surrogate.mean()
        mean_entropy = entropy.mean()

        error = (value - batch["target"]).square()
        if c.value_clip is not None:
            held = batch["value"] + (value - batch["value"]).clamp(-c.value_clip, c.value_clip)
            error = torch.max(error, (held - batch["target"]).square())
        value_loss = 0.5 * error.mean()

        with torch.no_grad():
            # k3: unbiased like -log_ratio, never negative, far less noisy.
            kl = (ratio - 1 - log_ratio).mean()
            clipped = ((ratio - 1).abs() > clip_range).float().mean()
        metrics = {
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": mean_entropy.detach(),
            "approx_kl": kl,
            "clip_fraction": clipped,
        }
        return Losses(policy_loss - c.entropy_coef * mean_entropy, c.value_coef * value_loss, metrics)

    def prepare_batch(self, policy: Any, rollout: Columns, stale: Tensor | None, *, compiled: bool) -> TrainBatch:
        """`prepare`, with compiled advantages where that gives the same, and stale steps corrected."""
        cls = type(self)
        if "advantage" in rollout:  # computed elsewhere
            return self.prepare(rollout, rollout["advantage"], rollout.get("target"))
        compiled = compiled and rollout["reward"].device.type == "cpu"
        # A subclass with advantages of its own knows best what to do with old experience.
        ours = cls.prepare is PPO.prepare and cls.advantages is PPO.advantages
        if stale is not None and self.config.correction != "none" and ours:
            return self._prepare_stale(policy, rollout, stale, compiled=compiled)
        if cls is PPO and compiled:
            return self.prepare(rollout, compiled_gae(rollout, scale_reward(rollout), **self._discounts()))
        return self.prepare(rollout)

    def _prepare_stale(self, policy: Any, rollout: Columns, stale: Tensor, *, compiled: bool) -> TrainBatch:
        """What `prepare` gives, for experience of which some is older than the policy."""
        c = self.config
        current, log_weight = reevaluate(policy, rollout, stale)
        reward, weight = scale_reward(current), log_weight.exp()
        settings = self._discounts()
        if c.correction == "decoupled":
            advantage = (
                compiled_gae(current, reward, **settings) if compiled else gae(reward, **_trace(current), **settings)
            )
            return self.prepare({**current, "weight": weight.clamp(max=c.weight_limit)}, advantage)
        settings |= {"rho_bar": c.rho_bar, "c_bar": c.c_bar}
        if compiled:
            advantage, target = compiled_vtrace(current, reward, log_weight, **settings)
        else:
            advantage, target = vtrace(reward, log_ratio=log_weight, **_trace(current), **settings)
        return self.prepare({**current, "weight": weight.clamp(max=c.rho_bar)}, advantage, target)

    def _discounts(self) -> dict[str, Any]:
        return {"discount": self.config.gamma, "lam": self.config.gae_lambda}

    def compiled_update(self, net: CompiledActorCritic, adam: Adam) -> CompiledUpdate | None:
        """For PPO itself: a subclass may compute something else."""
        return CompiledPPO(net, self.config, adam) if type(self) is PPO else None

    def has_moved_enough(self, metrics: Mapping[str, Tensor]) -> bool:
        """Whether the KL of a minibatch is above the limit."""
        limit = self.config.target_kl
        return limit is not None and bool(metrics["approx_kl"] > 1.5 * limit)

    def describe(self, batch: TrainBatch, metrics: Mapping[str, float]) -> dict[str, float]:
        """The whole loss, and how values and advantages look."""
        c = self.config
        about = {
            "loss": metrics["policy_loss"] - c.entropy_coef * metrics["entropy"] + c.value_coef * metrics["value_loss"],
            "explained_variance": explained_variance(batch["value"], batch["target"]),
            "value_mean": float(batch["value"].mean()),
            "return_mean": float(batch["target"].mean()),
            "advantage_std": float(batch["advantage"].std(correction=0)),
        }
        if "weight" in batch:
            about["behaviour_weight"] = float(batch["weight"].mean())
        return about

    def clip_range(self, progress: float) -> float:
        """Clip interval after `progress` (0 to 1) of the training."""
        return self.config.clip_range * remaining(self.config.clip_range_schedule, progress)


def _trace(rollout: Columns) -> dict[str, Any]:
    """The columns that advantages are computed along, beside the reward."""
    return {key: rollout[key] for key in ("value", "next_value", "terminated", "truncated")}
