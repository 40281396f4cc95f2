"""What a learner passes to a policy to have recorded turns scored, and what it gets back.

The learner and the policy are in different layers and share these types: the learner passes recorded turns
(`TurnInput`), and the policy scores exactly their tokens (`TokenLogProbs`, `ParsedReply`) without re-tokenising.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from palaestra.experience.trajectory import Trajectory, Turn


@dataclass(frozen=True, eq=False)
class TurnInput:
    """A recorded turn with everything needed to score it."""

    turn: Turn
    pictures: Mapping[str, bytes] = field(repr=False)
    """Encoded pictures by SHA-256, including those of the turn."""
    temperature: float = 1.0
    """Sampling temperature."""


@dataclass(frozen=True, eq=False)
class TokenLogProbs:
    """A policy's scores of the sampled tokens of B turns of at most G tokens."""

    log_probs: Tensor
    """`[B, G]` of the recorded tokens at their sampling temperature; 0 where padded."""
    mask: Tensor
    """`[B, G]` bool: True where there is a token, from the left."""
    entropy: Tensor | None = None
    """`[B, G]` entropy in nats of each token's distribution; 0 where padded. None unless requested."""
    values: Tensor | None = None
    """`[B]`, at the last prompt token. None unless requested."""
    is_top: Tensor | None = None
    """`[B, G]` bool: whether the recorded token is the most likely one; False where padded. None unless requested."""
    mean_log_prob: Tensor | None = None
    """`[B, G]` mean log-probability over all tokens that may be sampled, for label smoothing; 0 where padded. None
    unless requested."""


class ParsedReply(NamedTuple):
    """The tokens of a recorded turn, decoded by a policy."""

    text: str
    action: Mapping[str, Any] | None
    """As `Turn.action`; None if unreadable."""
    image_size: tuple[int, int]
    """Width and height of the current screen in the prompt of this model."""


def turn_inputs(trajectory: Trajectory) -> list[TurnInput]:
    """The turns of an episode as inputs for a policy."""
    return [TurnInput(turn, trajectory.pictures, trajectory.temperature) for turn in trajectory.turns]
