"""Advantages of episodes and of their turns, as pure functions of numbers. Nothing here knows a policy or a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Scale", "group_advantages", "step_gae"]

Scale: TypeAlias = Literal["std", "none"]
Numbers: TypeAlias = Sequence[float] | npt.NDArray[np.floating]
Doubles: TypeAlias = npt.NDArray[np.float64]


def group_advantages(rewards: Numbers, scale: Scale = "std", eps: float = 1e-6) -> Doubles:
    """How much better each episode of a group did than the group: reward minus mean, divided by the spread or not.

    The spread is that of the group itself (population). `none` keeps hard and easy groups on the scale of the reward;
    `std` makes every group count alike, so a group with one lucky episode in eight pushes as hard as a mixed one.
    """
    earned = np.asarray(rewards, np.float64)
    advantage: Doubles = earned - earned.mean()
    if scale == "std":
        advantage = advantage / (earned.std() + eps)
    return advantage


def step_gae(rewards: Numbers, values: Numbers, *, gamma: float, gae_lambda: float, last_value: float = 0.0) -> Doubles:
    """Generalised advantages along the turns of one episode.

    `last_value` is what the future after the last turn is worth: 0 for an episode that ended, the newest value
    estimate for one that was cut short.
    """
    paid, worth = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    if paid.shape != worth.shape or paid.ndim != 1:
        raise ValueError(f"{paid.shape} rewards and {worth.shape} values: each turn needs one of each")
    following = np.append(worth[1:], last_value)
    surprise = paid + gamma * following - worth
    advantage = np.empty_like(surprise)
    carry = 0.0
    for t in reversed(range(len(surprise))):
        carry = surprise[t] + gamma * gae_lambda * carry
        advantage[t] = carry
    return advantage
