"""What an algorithm makes of trajectories (`Sample`); what its loss is given (`TokenBatch`) and returns (`Loss`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from palaestra.experience.trajectory import Trajectory, Turn
from palaestra.experience.turn_input import TurnInput

__all__ = ["Loss", "Row", "Sample", "TokenBatch", "behaviour_of", "token_batch", "token_count"]


@dataclass(frozen=True, eq=False)
class Sample:
    """One turn to learn from."""

    input: TurnInput
    advantage: float
    """Of every token of the turn."""
    weight: float
    """Of each of its tokens in the sum that is the objective."""
    value_target: float | None = None
    """What the value at this turn should have been; None when there is no value."""


@dataclass(frozen=True, eq=False)
class Row:
    """One turn as the policy sees it before it learns; every tensor is `[tokens]`."""

    proximal: Tensor
    """The recorded log-probability of fresh tokens, the policy's own of stale ones."""
    importance: Tensor
    """Weight of each token; exactly 1 for fresh ones."""
    value: float | None = None
    reference: Tensor | None = None
    capped: int = 0
    """How many of its tokens weigh less than they should, because of the limit."""


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """A microbatch of B turns, the longest of which has G tokens."""

    proximal: Tensor
    """`[B, G]`, as all the following unless they say otherwise; 0 where padded."""
    importance: Tensor
    mask: Tensor
    weight: Tensor
    """0 where padded: a sum over it is a sum over tokens."""
    advantage: Tensor
    """`[B]`"""
    token_share: float
    """1 / the tokens of the whole update: sums of it over all microbatches are means over the update."""
    turn_share: float
    """1 / the turns of the whole update."""
    reference: Tensor | None = None
    value_target: Tensor | None = None
    """`[B]`"""


class Loss(NamedTuple):
    """What to minimise on a microbatch, and its part of what is reported about the update."""

    total: Tensor
    said: Mapping[str, Tensor]
    """By the metric's name; parts of one epoch are added up."""


def token_count(trajectory: Trajectory) -> int:
    """How many tokens were sampled in the episode."""
    return sum(len(turn.token_ids) for turn in trajectory.turns)


def token_batch(
    samples: Sequence[Sample], rows: Mapping[int, Row], *, token_share: float, turn_share: float, device: torch.device
) -> TokenBatch:
    """Samples with their rows (by the turn's identity) as padded tensors."""
    own = [rows[id(sample.input.turn)] for sample in samples]
    mask = _padded([torch.ones(len(row.proximal), dtype=torch.bool) for row in own], device)
    references = [row.reference for row in own if row.reference is not None]
    targets = [sample.value_target for sample in samples if sample.value_target is not None]
    weight = torch.tensor([sample.weight for sample in samples], device=device)
    return TokenBatch(
        proximal=_padded([row.proximal for row in own], device),
        importance=_padded([row.importance for row in own], device),
        mask=mask,
        weight=weight[:, None] * mask,
        advantage=torch.tensor([sample.advantage for sample in samples], device=device),
        token_share=token_share,
        turn_share=turn_share,
        reference=_padded(references, device) if len(references) == len(own) else None,
        value_target=torch.tensor(targets, device=device) if len(targets) == len(samples) else None,
    )


def behaviour_of(turn: Turn) -> Tensor:
    """The recorded log-probabilities, in memory of their own."""
    return torch.tensor(turn.log_probs, dtype=torch.float32)


def _padded(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(device)
