"""The scale of rewards: one over the standard deviation of the discounted return, estimated while training.

Rewards are recorded as paid; a rollout carries the scale under which it is to be learned from. The estimate sees a
rollout's rewards before that rollout is learned from, so even the first one is scaled.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["RewardScale"]


class RewardScale:
    """Running variance of the discounted return of N environments."""

    def __init__(self, num_envs: int, discount: float) -> None:
        self._discount = discount
        self.running = np.zeros(num_envs, np.float64)
        self.mean, self.variance, self.count = 0.0, 1.0, 0.0

    def absorb(self, reward: NDArray[np.float32], ended: NDArray[np.bool_], valid: NDArray[np.bool_]) -> float:
        """Take in `[T, N]` rewards and return the scale."""
        returns = np.empty(reward.shape, np.float64)
        for t in range(len(reward)):
            self.running = self.running * self._discount + reward[t]
            returns[t] = self.running
            self.running[ended[t]] = 0.0
        seen = returns[valid]
        if seen.size:
            n, total = float(seen.size), self.count + seen.size
            delta = float(seen.mean()) - self.mean
            merged = self.variance * self.count + float(seen.var()) * n + delta * delta * self.count * n / total
            self.mean += delta * n / total
            self.variance, self.count = merged / total, total
        return self.scale

    @property
    def scale(self) -> float:
        """By how much to multiply rewards."""
        return float(1.0 / np.sqrt(self.variance + 1e-8))
