"""Proximal policy optimisation: what it learns from (`prepare`) and what it minimises (`losses`).

This is the algorithm as one reads it; `learner.update` runs it on any policy, and `learner.compiled` runs the same
arithmetic without dispatch for small networks. It knows no environment, no queue and no file, and never edits the
rollout it is given. docs/algorithms.md says why each detail is as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import torch
from pydantic import Field, model_validator
from torch import Tensor

from palaestra.config import Section, validated
from palaestra.errors import ConfigError, ExperienceError
from palaestra.experience.columns import Columns
from palaestra.learner.returns import gae

__all__ = ["PPO", "Losses", "PPOConfig", "TrainBatch"]

TrainBatch: TypeAlias = dict[str, Any]
"""Samples to learn from, `[B, ...]` by key: a rollout's entries flattened, plus `advantage` and `target`."""

LEARNED_FROM = ("observation", "action", "log_prob", "value", "action_mask", "duration", "weight")

REWARD_LIMIT = 10.0
"""Scaled rewards are clipped here, as in the reference implementations; unscaled ones never are."""


class PPOConfig(Section):
    """How PPO learns."""

    learning_rate: float = Field(default=3e-4, gt=0, le=3e38)
    """Step size of Adam. Too high and `approx_kl` jumps and returns collapse; too low and nothing moves."""

    learning_rate_schedule: Literal["constant", "linear"] = "constant"
    """`linear` falls to 0 at the end of training: a steadier finish, for runs whose length is known."""

    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount: how much a reward is worth one step later. 1/(1-gamma) steps is roughly how far the agent looks."""

    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """Between one-step bootstrapping (0: biased, calm) and whole returns (1: unbiased, noisy)."""

    n_epochs: int = Field(default=10, ge=1)
    """Passes over each rollout. More squeezes out more until `clip_fraction` says the data is used up."""

    batch_size: int = Field(default=64, ge=1)
    """Samples per gradient step. Must divide rollout_length x num_envs."""

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

    max_grad_norm: float | None = Field(default=0.5, gt=0)
    """Gradients longer than this are shortened to it. null: never."""

    grad_clip: Literal["separate", "global"] = "separate"
    """`separate`: actor and critic each by their own norm, so a large value error cannot silence the policy.
    `global`: by their common norm, as the reference implementations do."""

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

    adam_eps: float = Field(default=1e-5, gt=0, le=1)
    """Adam's epsilon. The reference implementations use 1e-5, not torch's 1e-8."""

    @model_validator(mode="after")
    def _traces_are_no_heavier_than_steps(self) -> PPOConfig:
        if self.c_bar > self.rho_bar:
            raise ValueError(f"c_bar {self.c_bar:g} is above rho_bar {self.rho_bar:g}; V-trace needs c_bar <= rho_bar")
        return self


class Losses(NamedTuple):
    """The two parts of the objective on one minibatch, and what to report about it."""

    policy: Tensor
    value: Tensor
    said: dict[str, Tensor]


class PPO:
    """PPO with clipped surrogate objective, clipped value error and entropy bonus."""

    def __init__(self, config: PPOConfig | None = None, **settings: Any) -> None:
        """Either a config, or its fields as keyword arguments: `PPO(learning_rate=1e-3)`."""
        self.config = config if config is not None else validated(PPOConfig, settings, place="algorithm")

    def with_settings(self, **changes: Any) -> Self:
        """The same algorithm with some of its settings replaced."""
        changed = copy.copy(self)
        changed.config = validated(type(self.config), {**self.config.model_dump(), **changes}, place="algorithm")
        return changed

    def prepare(self, rollout: Columns, advantage: Tensor | None = None, target: Tensor | None = None) -> TrainBatch:
        """Advantages and value targets (unless given), then everything flattened to `[B, ...]`.

        The rollout is left as it is.
        """
        if advantage is None:
            advantage = self.advantages(rollout)
        entries: TrainBatch = {key: rollout[key] for key in LEARNED_FROM if key in rollout}
        entries["advantage"] = advantage
        entries["target"] = advantage + rollout["value"] if target is None else target
        flat = {key: _flat(entry) for key, entry in entries.items()}
        if "valid" in rollout:
            keep = rollout["valid"].reshape(-1)
            flat = {key: _rows(entry, keep) for key, entry in flat.items()}
        return flat

    def advantages(self, rollout: Columns) -> Tensor:
        """Generalised advantages `[T, N]`."""
        return gae(
            scaled_reward(rollout),
            rollout["value"],
            rollout["next_value"],
            terminated=rollout["terminated"],
            truncated=rollout["truncated"],
            discount=self.config.gamma,
            lam=self.config.gae_lambda,
        )

    def losses(self, policy: Any, batch: TrainBatch, *, clip_range: float) -> Losses:
        """The objective on one minibatch."""
        c = self.config
        log_prob, entropy, value = evaluated(policy, batch)
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
        said = {
            "policy_loss": policy_loss.detach(),
            "value_loss": value_loss.detach(),
            "entropy": mean_entropy.detach(),
            "approx_kl": kl,
            "clip_fraction": clipped,
        }
        return Losses(policy_loss - c.entropy_coef * mean_entropy, c.value_coef * value_loss, said)

    def learning_rate(self, progress: float) -> float:
        """Step size after `progress` (0 to 1) of the training."""
        return self.config.learning_rate * _remaining(self.config.learning_rate_schedule, progress)

    def clip_range(self, progress: float) -> float:
        """Clip interval after `progress` (0 to 1) of the training."""
        return self.config.clip_range * _remaining(self.config.clip_range_schedule, progress)


def evaluated(policy: Any, batch: TrainBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, entropy and value of what is in the batch, under the policy as it is."""
    extra = {"duration": batch["duration"]} if "duration" in batch else {}
    found: tuple[Tensor, Tensor, Tensor] = policy.evaluate_actions(
        batch["observation"], batch["action"], mask=batch.get("action_mask"), **extra
    )
    size = (len(batch["action"]),)
    if any(part.shape != size for part in found):  # `[B, 1]` against `[B]` would silently become `[B, B]`
        shapes = [list(part.shape) for part in found]
        raise ConfigError(
            "policy", type(policy).__name__, f"its evaluate_actions gave log_prob, entropy, value of shapes {shapes}",
            f"Give each as {list(size)}",
        )  # fmt: skip
    return found


def scaled_reward(rollout: Columns) -> Tensor:
    """Rewards as they are learned from: multiplied by the scale the rollout carries, and then clipped."""
    reward: Tensor = rollout["reward"]
    scale = rollout.get("reward_scale")
    if scale is None or bool((scale == 1.0).all()):
        return reward
    scaled: Tensor = (reward * scale).clamp(-REWARD_LIMIT, REWARD_LIMIT)
    return scaled


def _remaining(schedule: str, progress: float) -> float:
    # A hair above 0, so that a run extended past its planned length does not divide by an interval of 0.
    return max(1.0 - progress, 1e-6) if schedule == "linear" else 1.0


def _flat(entry: Any) -> Any:
    if isinstance(entry, Mapping):
        return {name: part.flatten(0, 1) for name, part in entry.items()}
    return entry.flatten(0, 1)


def _rows(entry: Any, rows: Tensor) -> Any:
    if isinstance(entry, Mapping):
        return {name: part[rows] for name, part in entry.items()}
    return entry[rows]


def _picked(entry: Any, rows: Tensor) -> Any:
    # Several times faster than `entry[rows]`, which minibatches of images notice.
    if isinstance(entry, Mapping):
        return {name: part.index_select(0, rows) for name, part in entry.items()}
    return entry.index_select(0, rows)


def minibatch(batch: TrainBatch, rows: Tensor) -> TrainBatch:
    """The given rows of a batch."""
    return {key: _picked(entry, rows) for key, entry in batch.items()}


def joined(batches: list[TrainBatch]) -> TrainBatch:
    """Several prepared rollouts as one batch; each kept its own advantages.

    Samples without a weight weigh 1, and without a mask were free to act, beside others that have one.
    """
    if len(batches) == 1:
        return batches[0]
    keys = {key: None for batch in batches for key in batch}
    return {key: _concatenate([_entry(batch, key, batches) for batch in batches]) for key in keys}


def _concatenate(entries: list[Any]) -> Any:
    if isinstance(entries[0], Mapping):
        return {name: torch.cat([entry[name] for entry in entries]) for name in entries[0]}
    return torch.cat(entries)


def _entry(batch: TrainBatch, key: str, batches: list[TrainBatch]) -> Any:
    if key in batch:
        return batch[key]
    if key not in ("weight", "action_mask"):
        raise ExperienceError(f"learn: only some of the rollouts have {key}. Learn from them one by one.")
    example = next(other[key] for other in batches if key in other)
    return example.new_ones((len(batch["advantage"]), *example.shape[1:]))
