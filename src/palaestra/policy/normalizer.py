"""Running mean and variance of observations, part of the policy and saved with it.

The statistics are frozen while a rollout is collected and learned from, so that the probability ratio starts at
exactly 1; `absorb` moves them between rollouts. Evaluation never calls `absorb`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["ObservationNormalizer"]


class ObservationNormalizer(nn.Module):
    """Shifts and scales observations to mean 0 and variance 1, clipped to ±`clip`."""

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, size: int, clip: float = 10.0) -> None:
        super().__init__()
        self.clip = clip
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def scale(self) -> Tensor:
        """1 / standard deviation, float32."""
        return (self.variance + 1e-8).rsqrt().float()

    def forward(self, observation: Tensor) -> Tensor:
        """Normalised `[B, size]`."""
        return ((observation - self.mean.float()) * self.scale()).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def absorb(self, observation: Tensor) -> None:
        """Merge the moments of `observation[B, size]` (Chan's parallel formula, in float64)."""
        batch = observation.double()
        n = float(batch.shape[0])
        if n == 0:
            return
        mean, variance = batch.mean(0), batch.var(0, correction=0)
        total = self.count + n
        delta = mean - self.mean
        merged = self.variance * self.count + variance * n + delta * delta * (self.count * n / total)
        self.mean += delta * (n / total)
        self.variance.copy_(merged / total)
        self.count.copy_(total)
