"""Proximal policy optimisation: its training samples (`prepare`) and its objective (`losses`).

`learner.update` runs it on any policy; `learner.compiled` runs the same arithmetic in kernels for small networks.
docs/algorithms.md gives the reasons for each detail.

With stale experience there are three policies: the *behaviour* policy acted and recorded its log-probabilities, the
*proximal* policy is the one before this update, and the *current* policy is being trained. PPO clips current against
proximal, and weighs a sample by proximal / behaviour. Fresh steps keep their recorded numbers, so fresh experience is
learned from exactly as by plain PPO.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from palaestra.experience.columns import Columns, map_column
from palaestra.learner.adam import Adam
from palaestra.learner.algorithm import CompiledUpdate, Losses, RolloutAlgorithm, RolloutConfig, schedule_factor
from palaestra.learner.batch import TrainBatch, evaluate_actions, flatten_rollout, minibatch
from palaestra.learner.compiled import CompiledPPO, compiled_gae, compiled_vtrace
from palaestra.learner.returns import explained_variance, gae, scale_reward, vtrace
from palaestra.policy.compiled import CompiledActorCritic
from palaestra.policy.network import eval_mode

ROWS_PER_PASS = 1024
"""Steps per forward pass of `reevaluate`: enough to be fast, few enough for images of a large model."""


class PPOConfig(RolloutConfig):
    """Settings of PPO."""

    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Between one-step bootstrapping (0: biased, low variance) and full returns (1: unbiased, high variance)."""
    clip_range: float = Field(default=0.2, gt=0, lt=1)
    """Half-width of the clip interval around ratio 1. A wider one learns faster and becomes unstable sooner."""
    clip_range_schedule: Literal["constant", "linear"] = "constant"
    """`linear` narrows the interval to 0 at the end of training."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """Maximum change of a value from its old estimate per rollout. null: no limit. See docs/algorithms.md."""
    normalize_advantage: bool = True
    """Normalise the advantages of each minibatch to mean 0 and variance 1."""
    entropy_coef: float = Field(default=0.01, ge=0, le=1e6)
    """Weight of the entropy bonus. Raise it if `entropy` falls to 0 before the task is solved."""
    value_coef: float = Field(default=0.5, ge=0, le=1e6)
    """Weight of the value loss."""
    target_kl: float | None = Field(default=None, gt=0)
    """Stop improving the policy (not the value) on this rollout once a minibatch's KL exceeds 1.5 times this."""
    correction: Literal["none", "decoupled", "vtrace"] = "decoupled"
    """Correction for experience of older weights. `decoupled` clips around the policy before the update and weighs each
    sample by the probability ratio of the two; `vtrace` also cuts the traces of unlikely actions; `none` is plain PPO.
    On fresh experience all three are the same, bit for bit. See docs/async.md."""
    weight_limit: float = Field(default=10.0, ge=1, le=1e6)
    """`decoupled`: maximum weight of a stale sample. Higher is less biased and has more variance; at 2 a policy that
    changes fast loses a tenth of its weight and learns worse (benchmarks/results/staleness.md)."""
    rho_bar: float = Field(default=1.0, gt=0, le=1e6)
    """`vtrace`: maximum weight of a step's temporal difference, and of its sample in the objective."""
    c_bar: float = Field(default=1.0, gt=0, le=1e6)
    """`vtrace`: maximum weight with which later temporal differences are propagated back."""

    @model_validator(mode="after")
    def _check_trace_limits(self) -> PPOConfig:
        if self.c_bar > self.rho_bar:
            raise ValueError(f"c_bar {self.c_bar:g} is above rho_bar {self.rho_bar:g}; V-trace needs c_bar <= rho_bar")
        return self


class PPO(RolloutAlgorithm):
    """PPO with clipped surrogate objective, clipped value error and entropy bonus."""

    config_class = PPOConfig
    config: PPOConfig

    def prepare(self, rollout: Columns, advantage: Tensor | None = None, target: Tensor | None = None) -> TrainBatch:
        """The flattened rollout with advantages and value targets, which are computed unless given."""
        if advantage is None:
            advantage = self.advantages(rollout)
        target = advantage + rollout["value"] if target is None else target
        return flatten_rollout(rollout, advantage=advantage, target=target)

    def advantages(self, rollout: Columns) -> Tensor:
        """Generalised advantage estimates `[T, N]`."""
        return gae(scale_reward(rollout), **_trace(rollout), **self._discounts())

    def losses(self, policy: Any, batch: TrainBatch, *, clip_range: float) -> Losses:
        """The objective on one minibatch."""
        c = self.config
        log_prob, entropy, value = evaluate_actions(policy, batch)
        if "scaled_advantage" not in batch:
            batch = batch | self.scale_minibatch(batch)
        advantage = batch["scaled_advantage"]
        if "weight" in batch:
            # Not negative, so it may be applied inside the minimum: w * min(a, b) = min(w * a, w * b).
            advantage = advantage * batch["weight"]
        log_ratio = log_prob - batch["log_prob"]
        ratio = log_ratio.exp()
        surrogate = torch.min(advantage * ratio, advantage * ratio.clamp(1 - clip_range, 1 + clip_range))
        policy_loss = -surrogate.mean()
        mean_entropy = entropy.mean()

        error = (value - batch["target"]).square()
        if c.value_clip is not None:
            clipped_value = batch["value"] + (value - batch["value"]).clamp(-c.value_clip, c.value_clip)
            error = torch.max(error, (clipped_value - batch["target"]).square())
        value_loss = 0.5 * error.mean()

        with torch.no_grad():
            # k3 estimator: unbiased like -log_ratio, never negative, and with less variance.
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

    def scale_minibatch(self, columns: TrainBatch) -> TrainBatch:
        """The normalised advantages."""
        advantage = columns["advantage"]
        if self.config.normalize_advantage and len(advantage) > 1:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        return {"scaled_advantage": advantage}

    def prepare_batch(self, policy: Any, rollout: Columns, stale: Tensor | None, *, compiled: bool) -> TrainBatch:
        """`prepare` with correction of stale steps, and with compiled advantages if they give the same numbers."""
        cls = type(self)
        if "advantage" in rollout:  # computed elsewhere
            return self.prepare(rollout, rollout["advantage"], rollout.get("target"))
        compiled = compiled and rollout["reward"].device.type == "cpu"
        # A subclass that computes its own advantages decides itself how to use stale experience.
        inherited = cls.prepare is PPO.prepare and cls.advantages is PPO.advantages
        if stale is not None and self.config.correction != "none" and inherited:
            return self._prepare_stale(policy, rollout, stale, compiled=compiled)
        if cls is PPO and compiled:
            return self.prepare(rollout, compiled_gae(rollout, scale_reward(rollout), **self._discounts()))
        return self.prepare(rollout)

    def _prepare_stale(self, policy: Any, rollout: Columns, stale: Tensor, *, compiled: bool) -> TrainBatch:
        """`prepare` for a rollout with stale steps."""
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
        """Only for PPO itself: a subclass may compute something else."""
        return CompiledPPO(net, self.config, adam) if type(self) is PPO else None

    def should_stop_policy(self, metrics: Mapping[str, Tensor]) -> bool:
        """Whether the KL divergence of a minibatch is above the limit."""
        limit = self.config.target_kl
        return limit is not None and bool(metrics["approx_kl"] > 1.5 * limit)

    def extra_metrics(self, batch: TrainBatch, metrics: Mapping[str, float]) -> dict[str, float]:
        """The total loss, and statistics of values and advantages."""
        c = self.config
        extra = {
            "loss": metrics["policy_loss"] - c.entropy_coef * metrics["entropy"] + c.value_coef * metrics["value_loss"],
            "explained_variance": explained_variance(batch["value"], batch["target"]),
            "value_mean": float(batch["value"].mean()),
            "return_mean": float(batch["target"].mean()),
            "advantage_std": float(batch["advantage"].std(correction=0)),
        }
        if "weight" in batch:
            extra["behaviour_weight"] = float(batch["weight"].mean())
        return extra

    def clip_range(self, progress: float) -> float:
        """Clip range after a share `progress` (0 to 1) of the training."""
        return self.config.clip_range * schedule_factor(self.config.clip_range_schedule, progress)


def _trace(rollout: Columns) -> dict[str, Any]:
    """The columns besides the reward that advantages depend on."""
    return {key: rollout[key] for key in ("value", "next_value", "terminated", "truncated")}


@torch.no_grad()
def reevaluate(policy: Any, rollout: Columns, stale: Tensor) -> tuple[Columns, Tensor]:
    """The rollout as evaluated by the proximal policy, and log(proximal / behaviour) `[T, N]`.

    Stale steps get `log_prob`, `value` and `next_value` of the proximal policy. Fresh steps keep theirs, and their
    log-weight is exactly 0. The input is not modified.
    """
    rows = stale.reshape(-1).nonzero().squeeze(1)
    keys = ("observation", "action", "action_mask", "duration")
    flat: TrainBatch = {key: map_column(rollout[key], lambda p: p.flatten(0, 1)) for key in keys if key in rollout}
    log_prob, value = rollout["log_prob"].flatten().clone(), rollout["value"].flatten().clone()
    with eval_mode(policy):
        for some in rows.split(ROWS_PER_PASS):
            new_log_prob, _, new_value = evaluate_actions(policy, minibatch(flat, some))
            log_prob[some], value[some] = new_log_prob.to(log_prob.dtype), new_value.to(value.dtype)
    log_prob, value = log_prob.view_as(rollout["log_prob"]), value.view_as(rollout["value"])
    # The observation after a segment was not recorded, so its recorded value stays.
    next_value = rollout["next_value"].clone()
    continues = ~(rollout["terminated"] | rollout["truncated"])[:-1]
    next_value[:-1] = torch.where(continues & stale[1:], value[1:], next_value[:-1])
    current = {**rollout, "log_prob": log_prob, "value": value, "next_value": next_value}
    return current, log_prob - rollout["log_prob"]
