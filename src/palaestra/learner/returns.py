"""Advantages and returns as pure functions of `[T, N]` tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from palaestra.experience.columns import Columns

REWARD_LIMIT = 10.0
"""Scaled rewards are clipped to this, as in the reference implementations; unscaled rewards are not clipped."""


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
    """Generalised advantage estimates. Bootstraps at truncation, not at termination, and crosses neither.

    `next_value[t]` is the value of the observation after step t: of the final observation if the episode was truncated.
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
    """Advantages and value targets for experience of another policy, with `log_ratio` = log(current / behaviour).

    With all ratios 1 this is GAE; with lam = 1 it is V-trace as published. The advantage of a step does not include its
    own weight, which is applied in the objective.
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
    """1 - Var(target - prediction) / Var(target): 1 is perfect, 0 is no better than a constant."""
    variance = target.double().var(correction=0)
    if variance == 0:
        return float("nan")
    return float(1.0 - (target - prediction).double().var(correction=0) / variance)


def scale_reward(rollout: Columns) -> Tensor:
    """The rewards multiplied by the rollout's reward scale, if it has one, and clipped."""
    reward: Tensor = rollout["reward"]
    scale = rollout.get("reward_scale")
    if scale is None or bool((scale == 1.0).all()):
        return reward
    scaled: Tensor = (reward * scale).clamp(-REWARD_LIMIT, REWARD_LIMIT)
    return scaled
