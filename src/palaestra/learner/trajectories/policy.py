"""What learning needs of a policy that speaks tokens. Any class that has these members will do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from palaestra.experience.turn_input import TokenLogProbs, TurnInput

__all__ = ["SeparateValueHead", "TokenLogProbs", "TrajectoryPolicy", "TurnInput"]


class TrajectoryPolicy(Protocol):
    """A policy that can say how likely recorded tokens are, and be improved."""

    version: int
    """Counts updates; tokens sampled from now on carry it."""

    def log_probs(
        self, turns: Sequence[TurnInput], *, with_values: bool = False, with_entropy: bool = False, grad: bool = True
    ) -> TokenLogProbs:
        """Log-probabilities of the recorded tokens, in one batch. Nothing is re-tokenised."""
        ...

    def reference_log_probs(self, turns: Sequence[TurnInput]) -> Tensor | None:
        """The same `[B, G]` under the weights from before training; None when those are not kept."""
        ...

    def trainable_parameters(self) -> Iterable[nn.Parameter]:
        """What is learned, always in the same order."""
        ...


@runtime_checkable
class SeparateValueHead(Protocol):
    """A policy whose value head may learn at a rate of its own."""

    def value_parameters(self) -> Iterable[nn.Parameter]:
        """Those of `trainable_parameters` that only the value depends on."""
        ...
