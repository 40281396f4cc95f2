"""The interface of a policy on trajectories: `log_probs`, and optional protocols.

An `nn.Module` with `log_probs` is enough. Each optional protocol states what happens without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from palaestra.experience.trajectory import Trajectory
from palaestra.experience.turn_scoring import ParsedReply, TokenLogProbs, TurnInput


class TrajectoryPolicy(Protocol):
    """A trainable policy that computes log-probabilities of recorded tokens.

    Three attributes are optional. `exact_gradients`: `log_probs` returns the same numbers with and without gradients,
    because there is no dropout (default False). `half_precision`: part of it computes with less than 32 bits (default
    True). `vocabulary`: number of tokens (default unlimited).
    """

    def log_probs(
        self, turns: Sequence[TurnInput], *, with_values: bool = False, with_entropy: bool = False, grad: bool = True
    ) -> TokenLogProbs:
        """Log-probabilities of the recorded tokens, in one batch, without re-tokenising.

        Values and entropy may be None unless requested.
        """


@runtime_checkable
class Trainable(Protocol):
    """Names its trainable parameters; without it, every parameter that requires a gradient is trained."""

    def trainable_parameters(self) -> Iterable[nn.Parameter]:
        """The trained parameters, always in the same order."""


@runtime_checkable
class SeparateValueHead(Protocol):
    """Has a value head with its own learning rate; without it, there is one learning rate."""

    def value_parameters(self) -> Iterable[nn.Parameter]:
        """The trained parameters that only the value depends on."""


@runtime_checkable
class KeepsReference(Protocol):
    """Keeps the weights from before training; without it, `kl_coef` must be 0."""

    def reference_log_probs(self, turns: Sequence[TurnInput]) -> Tensor | None:
        """`[B, G]` as `log_probs`, under those weights; None if they were not kept."""


@runtime_checkable
class Fingerprinted(Protocol):
    """Records the fingerprint of its weights with its samples; without it, `Turn.weights` is not checked."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the present trained weights."""


@runtime_checkable
class ReadsReplies(Protocol):
    """Decodes recorded tokens; without it, recorded texts and actions are not checked."""

    def read_replies(self, trajectory: Trajectory) -> Sequence[ParsedReply]:
        """Every turn of the episode, decoded from its token ids alone."""


@runtime_checkable
class ScoresPastWeights(Protocol):
    """Scores with earlier weights; without it, log-probabilities of stale tokens are not checked."""

    def past_log_probs(self, turns: Sequence[TurnInput], learned: Mapping[str, Tensor], /) -> Tensor:
        """`[B, G]` under earlier values of the trained weights by name, without gradients."""


def trainable_weights(policy: TrajectoryPolicy) -> dict[str, nn.Parameter]:
    """The trained parameters in fixed order, by their names in `named_parameters`, else by number."""
    named = list(policy.named_parameters()) if hasattr(policy, "named_parameters") else []
    names = {parameter: name for name, parameter in named}
    if isinstance(policy, Trainable):
        trained = list(policy.trainable_parameters())
    else:
        trained = [parameter for _, parameter in named if parameter.requires_grad]
    return {names.get(parameter, str(number)): parameter for number, parameter in enumerate(trained)}
