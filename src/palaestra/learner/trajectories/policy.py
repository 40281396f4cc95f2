"""What learning needs of a policy that speaks tokens: `log_probs`, and parameters to train. The rest is optional.

An `nn.Module` with `log_probs` will do. Whatever else a policy may have is a protocol of its own, which says what
happens without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from palaestra.experience.trajectory import ParsedReply, TokenLogProbs, Trajectory, TurnInput

__all__ = ["Fingerprinted", "KeepsReference", "ReadsReplies", "ScoresPastWeights", "TrajectoryPolicy"]


class TrajectoryPolicy(Protocol):
    """A policy that can say how likely recorded tokens are, and be improved.

    Three attributes are optional. `exact_gradients`: log_probs(grad=True) gives the numbers of grad=False because there
    is no dropout (assumed False). `half_precision`: part of it computes with less than 32 bits (assumed True).
    `vocabulary`: how many tokens it knows (assumed unlimited).
    """

    def log_probs(
        self, turns: Sequence[TurnInput], *, with_values: bool = False, with_entropy: bool = False, grad: bool = True
    ) -> TokenLogProbs:
        """Log-probabilities of the recorded tokens, in one batch. Nothing is re-tokenised.

        Values may be None unless the algorithm learns them, the entropy unless its loss reads it.
        """


@runtime_checkable
class Trainable(Protocol):
    """A policy that says what it trains; an `nn.Module` without it trains every parameter that requires a gradient."""

    def trainable_parameters(self) -> Iterable[nn.Parameter]:
        """What is learned, always in the same order."""


@runtime_checkable
class SeparateValueHead(Protocol):
    """A policy whose value head learns at a rate of its own; without it, everything learns at one rate."""

    def value_parameters(self) -> Iterable[nn.Parameter]:
        """Those of the trained parameters that only the value depends on."""


@runtime_checkable
class KeepsReference(Protocol):
    """A policy that still has the weights from before training; without it, `kl_coef` is refused."""

    def reference_log_probs(self, turns: Sequence[TurnInput]) -> Tensor | None:
        """`[B, G]` as `log_probs`, under those weights; None when they are not kept after all."""


@runtime_checkable
class Fingerprinted(Protocol):
    """A policy whose samples name the weights they were drawn from; without it, `Turn.weights` is not checked."""

    @property
    def fingerprint(self) -> str:
        """Of the weights that learn, as they are now."""


@runtime_checkable
class ReadsReplies(Protocol):
    """A policy that can say what recorded tokens mean; without it, texts and actions are believed."""

    def read_replies(self, trajectory: Trajectory) -> Sequence[ParsedReply]:
        """Every turn of the episode, from its token ids alone."""


@runtime_checkable
class ScoresPastWeights(Protocol):
    """A policy that can score with earlier weights; without it, log-probabilities of stale tokens are believed."""

    def past_log_probs(self, turns: Sequence[TurnInput], learned: Mapping[str, Tensor], /) -> Tensor:
        """`[B, G]` under earlier values of the trained weights, by name; never differentiated."""


def trainable_weights(policy: TrajectoryPolicy) -> dict[str, nn.Parameter]:
    """What the policy learns, always in the same order, by the names of its `named_parameters`; else by number."""
    named = list(policy.named_parameters()) if hasattr(policy, "named_parameters") else []
    names = {parameter: name for name, parameter in named}
    if isinstance(policy, Trainable):
        trained = list(policy.trainable_parameters())
    else:
        trained = [parameter for _, parameter in named if parameter.requires_grad]
    return {names.get(parameter, str(number)): parameter for number, parameter in enumerate(trained)}
