"""Learning from trajectories in several processes: which turns each one runs, and how gradients are added.

All processes have the whole batch and divide its microbatches. The weights of tokens are computed over the whole batch,
so the sum of the gradients is the gradient of one process. All run the same number of forward passes, because each
pass of a sharded model is an exchange: a process without turns of its own repeats some with weight 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from palaestra.experience.turn_scoring import TurnInput
from palaestra.policy.weight_sync import is_sharded, own_part
from palaestra.transport.ranks import Ranks

R = TypeVar("R")

BUCKET_NUMBERS = 2**24
"""Gradients that are added in one exchange: 64 MB of float32."""


class AssignedPart(NamedTuple):
    """A microbatch of this process."""

    places: list[int]
    counts: bool
    """False: other processes have a microbatch left, and this one repeats some turns without effect."""


def assign_microbatches(
    ranks: Ranks, turns: Sequence[TurnInput], size: int, split: Callable[[Sequence[TurnInput], int], list[list[int]]]
) -> Iterator[AssignedPart]:
    """This process's microbatches of at most `size` turns; the same number in all processes."""
    if ranks.size > 1:
        size = min(size, -(-len(turns) // ranks.size))
    parts = split(turns, max(1, size))
    for start in range(0, len(parts), ranks.size):
        place = start + ranks.rank
        yield AssignedPart(parts[place], True) if place < len(parts) else AssignedPart(parts[0], False)


def run_divided(ranks: Ranks, forward: Callable[[], Mapping[int, R]]) -> dict[int, R]:
    """The results of all processes for their own turns, by position."""
    if ranks.size == 1:
        return dict(forward())
    merged: dict[int, R] = {}
    for results in ranks.gather(ranks.run(forward)):
        merged |= results
    return dict(sorted(merged.items()))


def average_gradients(ranks: Ranks, parameters: Sequence[nn.Parameter]) -> None:
    """Replace gradients by their means over all processes; those of sharded weights already are means."""
    if ranks.size == 1:
        return
    bucket: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None or is_sharded(parameter):
            continue
        bucket.append(parameter.grad)
        if sum(gradient.numel() for gradient in bucket) >= BUCKET_NUMBERS:
            _average(ranks, bucket)
            bucket = []
    _average(ranks, bucket)


def clip_gradients(ranks: Ranks, parameters: Sequence[nn.Parameter], limit: float) -> float:
    """Clip the gradients to a norm; returns the norm before. Of a sharded gradient each process has a part."""
    if not any(is_sharded(parameter) for parameter in parameters):
        return float(nn.utils.clip_grad_norm_(parameters, limit))
    gradients = [(parameter.grad, is_sharded(parameter)) for parameter in parameters if parameter.grad is not None]
    device = own_part(gradients[0][0]).device
    whole, parts = torch.zeros((), device=device), torch.zeros((), device=device)
    for gradient, sharded in gradients:
        square = own_part(gradient).float().square().sum()
        if sharded:
            parts += square
        else:
            whole += square
    norm = float((whole + ranks.sum(parts)).sqrt())
    factor = min(1.0, limit / (norm + 1e-6))
    for gradient, _ in gradients:
        own_part(gradient).mul_(factor)
    return norm


def _average(ranks: Ranks, gradients: list[Tensor]) -> None:
    if not gradients:
        return
    flat = ranks.sum(torch.cat([gradient.reshape(-1) for gradient in gradients])) / ranks.size
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
