"""Advantages and returns as pure functions of `[T, N]` tensors. Nothing here knows a policy or edits its input."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["discounted_returns", "explained_variance", "gae"]


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    *,
    terminated: Tensor,
    truncated: Tensor,
    discount: float,
    lam: float,
) -> Tensor:
    """Generalised advantages. Bootstraps through truncation, never through termination, and leaks across neither.

    `next_value[t]` is the value of what followed step t: of the final observation where the episode was cut short.
    """
    delta = reward + discount * next_value * ~terminated - value
    keep = discount * lam * (~(terminated | truncated)).to(delta.dtype)
    advantage = torch.empty_like(delta)
    carry = torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        carry = delta[t] + keep[t] * carry
        advantage[t] = carry
    return advantage


def discounted_returns(
    reward: Tensor, last_value: Tensor, *, terminated: Tensor, truncated: Tensor, next_value: Tensor, discount: float
) -> Tensor:
    """Monte Carlo returns: rewards to the end of the episode, then the value where it was cut short or still runs."""
    total = torch.empty_like(reward)
    carry = last_value
    for t in reversed(range(len(reward))):
        future = torch.where(truncated[t], next_value[t], carry)
        carry = reward[t] + discount * torch.where(terminated[t], torch.zeros_like(future), future)
        total[t] = carry
    return total


def explained_variance(prediction: Tensor, target: Tensor) -> float:
    """1 - Var(target - prediction) / Var(target): 1 is perfect, 0 no better than a constant, below 0 worse."""
    spread = target.double().var(correction=0)
    if spread == 0:
        return float("nan")
    return float(1.0 - (target - prediction).double().var(correction=0) / spread)
