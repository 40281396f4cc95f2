"""What a training loop needs of a learner, and a learner of an algorithm, whatever they learn from.

`palaestra.learner.conformance` checks an implementation against what is promised here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

from palaestra.config import Section
from palaestra.transport.source import SavedState

__all__ = ["Algorithm", "Learner"]

E_contra = TypeVar("E_contra", contravariant=True)
W_co = TypeVar("W_co", covariant=True)


class Learner(Protocol[E_contra, W_co]):
    """Improves a policy, batch by batch. Collects nothing, publishes nothing, prints nothing and writes no file."""

    @property
    def version(self) -> int:
        """How many updates have changed the weights."""

    def update(self, experience: E_contra, *, poll: Callable[[], None] | None = None) -> dict[str, float]:
        """Learn from experience, which stays as it is, and return metrics.

        `poll` is called now and then and may raise; weights and optimiser are then as they were before.
        """

    def weights(self) -> W_co:
        """The weights that learn, in place: whoever keeps them copies them."""

    def state(self) -> SavedState:
        """Everything the next number depends on, except the policy's weights."""

    def load_state(self, state: SavedState) -> None:
        """Continue where `state` was taken; the policy's weights must be those of that moment."""


class Algorithm(Protocol):
    """Prepares experience and gives a loss. Knows no environment, no queue and no file.

    A base class per kind of experience gives every optional member a default: `RolloutAlgorithm` and
    `TrajectoryAlgorithm`.
    """

    experience: ClassVar[str]
    """The kind it learns from: `rollouts` or `trajectories`."""
    config_class: ClassVar[type[Section]]
    """Its settings."""
    config: Any
