"""`TransitionAlgorithm`: the base class of algorithms that learn from transitions, online or offline.

A subclass names its policy and implements `losses`; everything else has a default. An algorithm knows no environment,
buffer or file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from pydantic import Field, field_validator
from torch import Tensor

from palaestra.config import Section, parse_section
from palaestra.errors import ConfigError, NonFiniteError
from palaestra.experience.replay import TransitionBatch
from palaestra.learner.adam import Adam
from palaestra.learner.algorithm import schedule_factor
from palaestra.policy.off_policy.fused import why_not_fused


class TransitionConfig(Section):
    """Settings shared by all algorithms on transitions."""

    learning_rate: float = Field(default=3e-4, gt=0, le=3e38)
    """Step size of Adam."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """`linear` and `cosine` decay to 0 at the end of training."""
    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount factor per step."""
    batch_size: int = Field(default=256, ge=1)
    """Transitions per gradient step."""
    buffer_size: int = Field(default=1_000_000, ge=1)
    """Capacity of the replay buffer in transitions; the oldest are overwritten."""
    learning_starts: int = Field(default=1_000, ge=0)
    """Environment steps before the first gradient step; a policy that is not pretrained takes them at random."""
    train_freq: int = Field(default=1, ge=1)
    """Steps of every environment between two updates."""
    gradient_steps: int = Field(default=1, ge=-1)
    """Gradient steps per update; -1: as many as environment steps since the last update."""
    target_tau: float = Field(default=0.005, gt=0, le=1)
    """Polyak coefficient of the target network (1: copy the weights)."""
    target_interval: int = Field(default=1, ge=1)
    """Gradient steps between two moves of the target network."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """The gradient of each network is clipped to this norm. null: no clipping."""
    adam_eps: float = Field(default=1e-8, gt=0, le=1)
    """Epsilon of Adam."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the products of large matrices in updates without autograd. `bfloat16` is faster on CPUs that
    support it; weights, optimiser, first and last layers stay float32."""

    @field_validator("gradient_steps")
    @classmethod
    def _check_gradient_steps(cls, value: int) -> int:
        if value == 0:
            remedy = "Use 1 or more, or -1 for as many as environment steps"
            raise ConfigError("algorithm.gradient_steps", 0, "an update would learn nothing", remedy)
        return value


class StepLoss(NamedTuple):
    """A loss of one minibatch, and the part of the policy that it trains."""

    group: str
    """Name in `policy.parameter_groups()`; no other weight receives a gradient."""
    loss: Tensor
    metrics: Mapping[str, Tensor] = {}
    td_error: Tensor | None = None
    """Errors `[B]` that become priorities of a prioritised replay buffer."""


class TransitionUpdate(Protocol):
    """The updates that `losses` defines, without autograd."""

    def learn(self, batch: TransitionBatch, rates: Mapping[str, float], first: int) -> dict[str, float]:
        """Take every gradient step of the batch and return means of the metrics.

        `first`: number of gradient steps before this batch. Raises `NonFiniteError` for a gradient that is not finite.
        """

    def is_current(self) -> bool:
        """Whether policy, target and optimiser are still in the memory that it works on."""


class TransitionAlgorithm:
    """Computes losses of transitions."""

    experience: ClassVar[str] = "transitions"
    config_class: ClassVar[type[TransitionConfig]] = TransitionConfig
    policy: ClassVar[str] = "q_network"
    """`policy.name` of the policy it trains; an own policy is given by its address in the configuration."""
    target_groups: ClassVar[tuple[str, ...]] = ("critic",)
    """Parts of the policy that have a slowly moving copy in `target`."""
    noise_per_sample: ClassVar[int] = 0
    """Standard normal vectors of the action's size per transition, in `batch["noise"][:, i]`."""
    offline_only: ClassVar[bool] = False
    """Whether it cannot learn from its own steps in an environment."""
    update_class: ClassVar[Callable[..., TransitionUpdate] | None] = None
    """The update that `losses` defines, without autograd. A subclass does not inherit it."""
    config: Any

    def __init__(self, config: TransitionConfig | None = None, **settings: Any) -> None:
        """Takes a config, or its fields as keyword arguments: `DQN(learning_rate=1e-3)`."""
        self.config = config if config is not None else parse_section(self.config_class, settings, place="algorithm")

    def losses(self, policy: Any, target: Any, batch: Mapping[str, Any], step: int) -> Iterable[StepLoss]:
        """The losses of one minibatch, in the order in which they are minimised.

        As a generator it resumes after the step on the loss that it yielded, so later losses see the new weights.
        `batch` has `observation, action, reward, next_observation, terminated` `[B, ...]`, `step` is the number of
        gradient steps before. `target` is a copy of the policy that needs no gradient.
        """
        raise NotImplementedError(f"{type(self).__name__} must define losses(policy, target, batch, step)")

    # ------------------------------------------------------------------ optional

    @classmethod
    def find_defect(cls) -> str:
        """Why this class cannot be trained with; empty if it can."""
        if cls.losses is TransitionAlgorithm.losses:
            return "it has no losses(policy, target, batch, step)"
        return ""

    def exploration(self, progress: float) -> float | None:
        """Amount of exploration after a share `progress` of the training, for the policy's distribution.

        None: the policy explores by itself.
        """
        return None

    @property
    def priority_exponent(self) -> float | None:
        """Exponent of the priorities of the replay buffer; None: sample uniformly."""
        return None

    def importance_exponent(self, progress: float) -> float:
        """Exponent of the importance weights of a prioritised buffer."""
        return 0.0

    def learning_rates(self, progress: float) -> dict[str, float]:
        """Step size of each group after a share `progress` of the training; groups left out use `learning_rate`."""
        return {}

    def why_not_compiled(self, policy: Any) -> str | None:
        """Why the policy is trained through autograd; None if there is an update without it."""
        # Not inherited: the losses of a subclass may be other ones.
        if type(self).__dict__.get("update_class") is None:
            return f"{type(self).__name__} has no update without autograd"
        return why_not_fused(policy)

    def compiled_update(self, policy: Any, target: Any, adam: Adam) -> TransitionUpdate | None:
        """The same update without autograd; None if there is none for this policy."""
        if self.update_class is None or self.why_not_compiled(policy) is not None:
            return None
        return self.update_class(self.config, self.target_groups, policy, target, adam)

    def extra_metrics(self, policy: Any) -> dict[str, float]:
        """Further metrics after an update."""
        return {}

    def learning_rate(self, progress: float) -> float:
        """Step size after a share `progress` (0 to 1) of the training."""
        rate: float = self.config.learning_rate * schedule_factor(self.config.learning_rate_schedule, progress)
        return rate


def non_finite_gradient(group: str, step: int) -> NonFiniteError:
    """The error for a gradient of the minibatch `step` of an update."""
    return NonFiniteError(
        f"the gradient of {group} is not finite at gradient step {step + 1} of this update. "
        "Lower algorithm.learning_rate, or check the rewards and observations."
    )
