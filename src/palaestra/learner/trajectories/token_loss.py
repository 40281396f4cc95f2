"""The objective over tokens: clipped surrogate, weights of stale tokens, distance to a reference, normalisers.

Pure functions of tensors `[B, G]` (turns by tokens). Three policies are told apart as in `learner.off_policy`: the
*behaviour* policy sampled a token, the *proximal* one is where this update starts, the *current* one moves. The weight
of a token in the sum is decided once for the whole update (`token_weights`), so cutting the update into microbatches
adds up to the same gradient, and no average is taken over a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = ["Normaliser", "Surrogate", "importance_weights", "k3", "surrogate", "token_weights"]

Normaliser: TypeAlias = Literal["tokens", "trajectory", "constant"]

LOG_LIMIT = 20.0
"""Log-ratios beyond this are held here: exp(20) is far outside every clip, and exp(90) is infinite."""


def token_weights(tokens: Sequence[int], normaliser: Normaliser, *, constant: float = 1.0) -> list[float]:
    """How much each token of every trajectory counts, given how many tokens each trajectory has.

    - `tokens`: 1 / all tokens of the update. Every token counts alike.
    - `trajectory`: 1 / (n |tau|), every trajectory counts alike. Wrong for agents, as AsyncWebRL argues: failures run
      to the step limit and are longer, so each of their tokens is pushed down less than a success's token is pushed
      up, and wandering is hardly punished.
    - `constant`: 1 / (n k) with one k for the whole training. Long failures are punished for each token they spend, and
      unlike `tokens` an update full of long episodes does not take a smaller step per token than one of short ones.
    """
    count = len(tokens)
    if count == 0:
        return []
    if normaliser == "tokens":
        return [1.0 / sum(tokens)] * count
    if normaliser == "trajectory":
        return [1.0 / (count * own) for own in tokens]
    return [1.0 / (count * constant)] * count


def importance_weights(proximal: Tensor, behaviour: Tensor, stale: Tensor, *, limit: float) -> Tensor:
    """min(proximal / behaviour, limit) for stale tokens; exactly 1 for tokens of the proximal policy itself."""
    weight = (proximal - behaviour).clamp(max=LOG_LIMIT).exp().clamp(max=limit)
    return torch.where(stale, weight, torch.ones_like(weight))


class Surrogate(NamedTuple):
    """The clipped objective of each token, and what there is to say about it."""

    objective: Tensor
    """`[B, G]`, to be raised."""
    log_ratio: Tensor
    clipped: Tensor
    """`[B, G]` bool: the clip holds this token, and it no longer pushes."""


def surrogate(
    log_probs: Tensor, proximal: Tensor, advantage: Tensor, importance: Tensor, *, clip_low: float, clip_high: float
) -> Surrogate:
    """PPO's clipped objective per token, with the ratio against the proximal policy.

    `advantage` is `[B]`. `clip_high` above `clip_low` (clip-higher) lets a token that was unlikely grow further before
    it is held, which keeps exploration alive.
    """
    log_ratio = (log_probs - proximal).clamp(-LOG_LIMIT, LOG_LIMIT)
    ratio = log_ratio.exp()
    push = advantage[:, None]
    free, held = push * ratio, push * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    # Never negative, so the weight may stand outside the minimum.
    return Surrogate(importance * torch.min(free, held), log_ratio, held < free)


def k3(log_probs: Tensor, other: Tensor) -> Tensor:
    """KL(current || other) estimated on the current policy's tokens, one number per token, never negative."""
    difference = (other - log_probs).clamp(-LOG_LIMIT, LOG_LIMIT)
    return difference.exp() - difference - 1.0
