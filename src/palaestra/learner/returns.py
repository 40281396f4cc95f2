"""Advantages and returns as pure functions of `[T, N]` tensors. Nothing here knows a policy or edits its input."""

from __future__ import annotations

import torch
from torch import Tensor

from palaestra.experience.columns import Columns

__all__ = ["explained_variance", "gae", "scale_reward", "vtrace"]

REWARD_LIMIT = 10.0
"""Scaled rewards are clipped here, as in the reference implementations; unscaled ones never are."""


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


def vtrace(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    log_ratio: Tensor,
    *,
    terminated: Tensor,
    truncated: Tensor,
    discount: float,
    lam: float,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Advantages and value targets for experience of another policy, `log_ratio` = log(today's / the one that acted).

    With all ratios 1 they are GAE's; with lam = 1 they are V-trace as published. The advantage of a step does not
    contain its own weight: that belongs into the objective.
    """
    ratio = log_ratio.exp()
    rho, c = ratio.clamp(max=rho_bar), ratio.clamp(max=c_bar)
    delta = reward + discount * next_value * ~terminated - value
    keep = discount * lam * (~(terminated | truncated)).to(delta.dtype)
    advantage, target = torch.empty_like(delta), torch.empty_like(delta)
    carry = torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        advantage[t] = delta[t] + keep[t] * carry
        carry = rho[t] * delta[t] + keep[t] * c[t] * carry
        target[t] = value[t] + carry
    return advantage, target


def explained_variance(prediction: Tensor, target: Tensor) -> float:
    """1 - Var(target - prediction) / Var(target): 1 is perfect, 0 no better than a constant, below 0 worse."""
    spread = target.double().var(correction=0)
    if spread == 0:
        return float("nan")
    return float(1.0 - (target - prediction).double().var(correction=0) / spread)


def scale_reward(rollout: Columns) -> Tensor:
    """Rewards as they are learned from: multiplied by the scale that the rollout carries, and then clipped."""
    reward: Tensor = rollout["reward"]
    scale = rollout.get("reward_scale")
    if scale is None or bool((scale == 1.0).all()):
        return reward
    scaled: Tensor = (reward * scale).clamp(-REWARD_LIMIT, REWARD_LIMIT)
    return scaled
