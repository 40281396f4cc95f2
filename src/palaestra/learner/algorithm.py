"""The `Learner` and `Algorithm` protocols, and `RolloutAlgorithm`, the base class of algorithms on rollouts.

A subclass of `RolloutAlgorithm` implements `prepare` and `loss`; everything else has a default. An algorithm knows no
environment, queue or file, and never modifies the rollout it receives.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from palaestra.config import Section, parse_section
from palaestra.errors import ConfigError
from palaestra.experience.columns import Columns
from palaestra.learner.adam import Adam
from palaestra.learner.batch import TrainBatch
from palaestra.policy.compiled import CompiledActorCritic
from palaestra.transport.source import SavedState

E_contra = TypeVar("E_contra", contravariant=True)
W_co = TypeVar("W_co", covariant=True)


class Learner(Protocol[E_contra, W_co]):
    """Improves a policy batch by batch. It does not collect, publish, print or write files."""

    @property
    def version(self) -> int:
        """Number of updates that changed the weights."""

    def update(self, experience: E_contra, *, poll: Callable[[], None] | None = None) -> dict[str, float]:
        """Learn from experience without modifying it, and return metrics.

        `poll` is called repeatedly and may raise; weights and optimiser are then restored to their previous state.
        """

    def weights(self) -> W_co:
        """The trained weights, not copied."""

    def state(self) -> SavedState:
        """Everything that determines the next update, except the policy's weights."""

    def load_state(self, state: SavedState) -> None:
        """Continue from `state`; the policy must have the weights it had then."""


class Algorithm(Protocol):
    """Prepares experience and computes a loss.

    The base classes `RolloutAlgorithm` and `TrajectoryAlgorithm` provide a default for every optional member.
    """

    experience: ClassVar[str]
    """The kind of experience: `rollouts` or `trajectories`."""
    config_class: ClassVar[type[Section]]
    """The section of its settings."""
    config: Any


class RolloutConfig(Section):
    """Settings shared by all algorithms on rollouts."""

    learning_rate: float = Field(default=3e-4, gt=0, le=3e38)
    """Step size of Adam. If it is too high, `approx_kl` jumps and returns collapse; if too low, nothing is learned."""
    learning_rate_schedule: Literal["constant", "linear"] = "constant"
    """`linear` decays to 0 at the end of training, for runs of known length."""
    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount factor per step. The effective horizon is about 1/(1-gamma) steps."""
    n_epochs: int = Field(default=10, ge=1)
    """Passes over each rollout. A high `clip_fraction` means that there are too many."""
    batch_size: int = Field(default=64, ge=1)
    """Samples per gradient step. Must divide rollout_length x num_envs."""
    max_grad_norm: float | None = Field(default=0.5, gt=0)
    """Gradients are clipped to this norm. null: no clipping."""
    grad_clip: Literal["separate", "global"] = "separate"
    """`separate`: clip actor and critic by their own norms, so a large value error does not shrink the policy gradient.
    `global`: clip by their common norm, as the reference implementations do."""
    adam_eps: float = Field(default=1e-5, gt=0, le=1)
    """Epsilon of Adam. The reference implementations use 1e-5, torch's default is 1e-8."""


class Losses(NamedTuple):
    """The two parts of the objective on one minibatch, and metrics about it."""

    policy: Tensor
    value: Tensor
    metrics: Mapping[str, Tensor]


class CompiledUpdate(Protocol):
    """The update that `losses` defines, in compiled kernels."""

    net: CompiledActorCritic
    parallel: bool
    """Whether it may use a second core. The result does not depend on it."""

    def learn(self, batch: TrainBatch, order: Tensor, *, rate: float, clip_range: float) -> dict[str, float]:
        """Run every epoch and return the means of the metrics."""


class RolloutAlgorithm:
    """Prepares rollouts and computes a loss."""

    experience: ClassVar[str] = "rollouts"
    config_class: ClassVar[type[RolloutConfig]] = RolloutConfig
    config: Any

    def __init__(self, config: RolloutConfig | None = None, **settings: Any) -> None:
        """Takes a config, or its fields as keyword arguments: `PPO(learning_rate=1e-3)`."""
        self.config = config if config is not None else parse_section(self.config_class, settings, place="algorithm")

    def prepare(self, rollout: Columns) -> TrainBatch:
        """Training samples `[B, ...]` from a rollout `[T, N]`, usually `flatten_rollout(rollout, ...)`."""
        raise NotImplementedError(f"{type(self).__name__} must define prepare(rollout)")

    def loss(self, policy: Any, batch: TrainBatch) -> Tensor:
        """The loss of a minibatch."""
        raise NotImplementedError(f"{type(self).__name__} must define loss(policy, batch)")

    # ------------------------------------------------------------------ optional

    @classmethod
    def find_defect(cls) -> str:
        """Why this class cannot be trained with; empty if it can."""
        if cls.prepare is RolloutAlgorithm.prepare:
            return "it has no prepare(rollout)"
        if cls.loss is RolloutAlgorithm.loss and cls.losses is RolloutAlgorithm.losses:
            return "it has no loss(policy, batch)"
        return ""

    def losses(self, policy: Any, batch: TrainBatch, *, clip_range: float) -> Losses:
        """The loss, split into the parts that are reported and clipped separately: means over the samples."""
        loss = self.loss(policy, batch)
        if not (isinstance(loss, Tensor) and loss.shape == () and loss.requires_grad):
            kind = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) and loss.shape else type(loss).__name__
            reason = f"its loss returned {kind}, which cannot be minimised"
            raise ConfigError("algorithm", type(self).__name__, reason, "Return a scalar tensor with a gradient")
        return Losses(loss, torch.zeros_like(loss), {"policy_loss": loss.detach()})

    def scale_minibatch(self, columns: TrainBatch) -> TrainBatch:
        """Columns that depend on the statistics of a whole minibatch, for learning in several processes.

        `columns`: those with one number per sample. `losses` finds the result in its part of the minibatch.
        """
        return {}

    def prepare_batch(self, policy: Any, rollout: Columns, stale: Tensor | None, *, compiled: bool) -> TrainBatch:
        """`prepare` with further inputs: `stale` `[T, N]` marks steps of other weights, None if there are none.

        `compiled` allows compiled kernels on the CPU.
        """
        return self.prepare(rollout)

    def compiled_update(self, net: CompiledActorCritic, adam: Adam) -> CompiledUpdate | None:
        """The same update in compiled kernels; None if there is none."""
        return None

    def should_stop_policy(self, metrics: Mapping[str, Tensor]) -> bool:
        """Whether to stop improving the policy on this rollout, given a minibatch's metrics."""
        return False

    def extra_metrics(self, batch: TrainBatch, metrics: Mapping[str, float]) -> dict[str, float]:
        """Further metrics of an update."""
        return {"loss": metrics["policy_loss"]}

    def with_settings(self, **changes: Any) -> Self:
        """A copy of the algorithm with some settings replaced."""
        changed = copy.copy(self)
        changed.config = parse_section(type(self.config), {**self.config.model_dump(), **changes}, place="algorithm")
        return changed

    def learning_rate(self, progress: float) -> float:
        """Step size after a share `progress` (0 to 1) of the training."""
        rate: float = self.config.learning_rate * schedule_factor(self.config.learning_rate_schedule, progress)
        return rate

    def clip_range(self, progress: float) -> float:
        """Clip range after a share `progress` (0 to 1) of the training, for algorithms that have one."""
        return 0.0


def schedule_factor(schedule: str, progress: float) -> float:
    """The factor of a scheduled number after a share `progress` of the training."""
    # Above 0, so that a run extended past its planned length does not divide by an interval of 0.
    if schedule == "linear":
        return max(1.0 - progress, 1e-6)
    return max(0.5 * (1.0 + math.cos(math.pi * progress)), 1e-6) if schedule == "cosine" else 1.0
