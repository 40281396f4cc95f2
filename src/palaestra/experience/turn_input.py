"""What a model is asked about a recorded turn (`TurnInput`), and what it answers (`TokenLogProbs`, `ParsedReply`).

The policy and the learner stand in different layers and meet here: the learner asks with recorded token ids and the
pictures they were sampled from, the policy answers for exactly those tokens. Nothing is re-tokenised in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from palaestra.experience.trajectory import Trajectory, Turn

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ParsedReply", "TokenLogProbs", "TurnInput", "turn_inputs"]


@dataclass(frozen=True, eq=False)
class TurnInput:
    """One recorded turn with everything needed to compute its log-probabilities again."""

    turn: Turn
    pictures: Mapping[str, bytes] = field(repr=False)
    """Encoded pictures by SHA-256; at least those that the turn names."""
    temperature: float = 1.0
    """What the tokens were sampled at."""


@dataclass(frozen=True, eq=False)
class TokenLogProbs:
    """What a policy says about the sampled tokens of B turns, the longest of which has G."""

    log_probs: Tensor
    """`[B, G]` of the recorded token ids, at the temperature they were sampled at; 0 where padded."""
    mask: Tensor
    """`[B, G]` bool: True where there is a token, from the left."""
    entropy: Tensor | None = None
    """`[B, G]` nats, of the distribution each token was drawn from; 0 where padded. None unless asked for."""
    values: Tensor | None = None
    """`[B]`, read at the last prompt token. None unless asked for."""


class ParsedReply(NamedTuple):
    """What the tokens of a recorded turn mean to a policy."""

    text: str
    action: Mapping[str, Any] | None
    """As `Turn.action`; None when the text is no action."""
    image_size: tuple[int, int]
    """Width and height at which this model sees the screen that the turn answers."""


def turn_inputs(trajectory: Trajectory) -> list[TurnInput]:
    """The turns of an episode, in order, each with the pictures of the whole."""
    return [TurnInput(turn, trajectory.pictures, trajectory.temperature) for turn in trajectory.turns]
