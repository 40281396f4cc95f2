"""What learning needs of a policy that speaks tokens. Any class that has these members will do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from palaestra.experience.trajectory import Trajectory
from palaestra.experience.turn_input import TokenLogProbs, TurnInput

__all__ = ["Fingerprinted", "ReadReply", "ReadsReplies", "RecallsVersions", "SeparateValueHead", "TokenLogProbs",
           "TrajectoryPolicy", "TurnInput"]  # fmt: skip


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

    # Three attributes are optional. `exact_gradients`: log_probs(grad=True) gives the numbers of grad=False because
    # there is no dropout (assumed False). `half_precision`: part of it computes with less than 32 bits (assumed True).
    # `vocabulary`: how many tokens it knows (assumed unlimited).


@runtime_checkable
class SeparateValueHead(Protocol):
    """A policy whose value head may learn at a rate of its own."""

    def value_parameters(self) -> Iterable[nn.Parameter]:
        """Those of `trainable_parameters` that only the value depends on."""
        ...


@runtime_checkable
class Fingerprinted(Protocol):
    """A policy whose samples name the weights they were drawn from (`Turn.weights`)."""

    @property
    def fingerprint(self) -> str:
        """Of the weights that act as the policy's present version."""
        ...


class ReadReply(NamedTuple):
    """What the tokens of a recorded turn say."""

    text: str
    action: Mapping[str, Any] | None
    """As `Turn.action`; None when the text is no action."""
    image_size: tuple[int, int]
    """Width and height at which this model sees the screen that the turn answers."""


@runtime_checkable
class ReadsReplies(Protocol):
    """A policy that can say what recorded tokens mean."""

    def read_replies(self, trajectory: Trajectory) -> Sequence[ReadReply]:
        """Every turn of the episode, from its token ids alone."""
        ...


@runtime_checkable
class RecallsVersions(Protocol):
    """A policy that keeps the weights of some earlier versions, so that their tokens can be checked."""

    def recalls(self, version: int) -> bool:
        """Whether the weights of this version are still here."""
        ...

    def past_log_probs(self, turns: Sequence[TurnInput], *, version: int) -> Tensor:
        """`[B, G]` of the recorded tokens under the weights of that version, never differentiated."""
        ...
