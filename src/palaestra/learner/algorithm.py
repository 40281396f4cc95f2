"""`RolloutAlgorithm`, the base class of algorithms on rollouts: what to learn from, and the loss.

An algorithm of one's own writes `prepare` and `loss`; everything else has a default. It knows no environment, no queue
and no file, and never edits the rollout it is given.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

import torch
from pydantic import Field
from torch import Tensor

from palaestra.config import Section, parse_section
from palaestra.errors import ConfigError
from palaestra.experience.columns import Columns
from palaestra.learner.adam import Adam
from palaestra.learner.batch import TrainBatch
from palaestra.policy.compiled import CompiledActorCritic

__all__ = ["CompiledUpdate", "Losses", "RolloutAlgorithm", "RolloutConfig"]


class RolloutConfig(Section):
    """What every algorithm on rollouts can be told."""

    learning_rate: float = Field(default=3e-4, gt=0, le=3e38)
    """Step size of Adam. Too high and `approx_kl` jumps and returns collapse; too low and nothing moves."""
    learning_rate_schedule: Literal["constant", "linear"] = "constant"
    """`linear` falls to 0 at the end of training: a steadier finish, for runs whose length is known."""
    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount: how much a reward is worth one step later. 1/(1-gamma) steps is roughly how far the agent looks."""
    n_epochs: int = Field(default=10, ge=1)
    """Passes over each rollout. More squeezes out more until `clip_fraction` says the data is used up."""
    batch_size: int = Field(default=64, ge=1)
    """Samples per gradient step. Must divide rollout_length x num_envs."""
    max_grad_norm: float | None = Field(default=0.5, gt=0)
    """Gradients longer than this are shortened to it. null: never."""
    grad_clip: Literal["separate", "global"] = "separate"
    """`separate`: actor and critic each by their own norm, so a large value error cannot silence the policy.
    `global`: by their common norm, as the reference implementations do."""
    adam_eps: float = Field(default=1e-5, gt=0, le=1)
    """Adam's epsilon. The reference implementations use 1e-5, not torch's 1e-8."""


class Losses(NamedTuple):
    """The two parts of the objective on one minibatch, and what to report about it."""

    policy: Tensor
    value: Tensor
    metrics: Mapping[str, Tensor]


class CompiledUpdate(Protocol):
    """The same update as `losses` describes, in compiled kernels."""

    net: CompiledActorCritic

    def learn(self, batch: TrainBatch, order: Tensor, *, rate: float, clip_range: float) -> dict[str, float]:
        """Run every epoch and return the means of the diagnostics."""


class RolloutAlgorithm:
    """Prepares rollouts and gives a loss."""

    experience: ClassVar[str] = "rollouts"
    config_class: ClassVar[type[RolloutConfig]] = RolloutConfig
    config: Any

    def __init__(self, config: RolloutConfig | None = None, **settings: Any) -> None:
        """Either a config, or its fields as keyword arguments: `PPO(learning_rate=1e-3)`."""
        self.config = config if config is not None else parse_section(self.config_class, settings, place="algorithm")

    def prepare(self, rollout: Columns) -> TrainBatch:
        """What to learn from a rollout `[T, N]`: samples `[B, ...]`, usually `flatten_rollout(rollout, ...)`."""
        raise NotImplementedError(f"{type(self).__name__} must define prepare(rollout)")

    def loss(self, policy: Any, batch: TrainBatch) -> Tensor:
        """What to minimise on a minibatch."""
        raise NotImplementedError(f"{type(self).__name__} must define loss(policy, batch)")

    # ------------------------------------------------------------------ everything below has a default

    @classmethod
    def find_defect(cls) -> str:
        """Why the class cannot be trained with; empty when it can."""
        if cls.prepare is RolloutAlgorithm.prepare:
            return "it has no prepare(rollout)"
        if cls.loss is RolloutAlgorithm.loss and cls.losses is RolloutAlgorithm.losses:
            return "it has no loss(policy, batch)"
        return ""

    def losses(self, policy: Any, batch: TrainBatch, *, clip_range: float) -> Losses:
        """The loss in the parts that are reported, and clipped, apart."""
        loss = self.loss(policy, batch)
        if not (isinstance(loss, Tensor) and loss.shape == () and loss.requires_grad):
            gave = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) and loss.shape else type(loss).__name__
            reason = f"its loss gave {gave}, which cannot be minimised"
            raise ConfigError("algorithm", type(self).__name__, reason, "Give one number with a gradient")
        return Losses(loss, torch.zeros_like(loss), {"policy_loss": loss.detach()})

    def prepare_batch(self, policy: Any, rollout: Columns, stale: Tensor | None, *, compiled: bool) -> TrainBatch:
        """`prepare`, where `stale` `[T, N]` marks steps of other weights than the policy's; None when there are none.

        `compiled` allows compiled kernels on the CPU.
        """
        return self.prepare(rollout)

    def compiled_update(self, net: CompiledActorCritic, adam: Adam) -> CompiledUpdate | None:
        """The same update in compiled kernels; None when there is none."""
        return None

    def has_moved_enough(self, metrics: Mapping[str, Tensor]) -> bool:
        """Whether the policy should not be improved any further on this rollout, given a minibatch's metrics."""
        return False

    def describe(self, batch: TrainBatch, metrics: Mapping[str, float]) -> dict[str, float]:
        """Further metrics of an update."""
        return {"loss": metrics["policy_loss"]}

    def with_settings(self, **changes: Any) -> Self:
        """The same algorithm with some of its settings replaced."""
        changed = copy.copy(self)
        changed.config = parse_section(type(self.config), {**self.config.model_dump(), **changes}, place="algorithm")
        return changed

    def learning_rate(self, progress: float) -> float:
        """Step size after `progress` (0 to 1) of the training."""
        rate: float = self.config.learning_rate * remaining(self.config.learning_rate_schedule, progress)
        return rate

    def clip_range(self, progress: float) -> float:
        """Clip interval after `progress` (0 to 1) of the training, for algorithms that have one."""
        return 0.0


def remaining(schedule: str, progress: float) -> float:
    """The share of a scheduled number that is left after `progress` of the training."""
    # A hair above 0, so that a run extended past its planned length does not divide by an interval of 0.
    return max(1.0 - progress, 1e-6) if schedule == "linear" else 1.0
