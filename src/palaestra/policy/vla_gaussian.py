"""A normal distribution around a model's action: what turns a model that says one action into one that can explore.

Works on single actions `[B, d]` and on chunks `[B, k, d]`; log-probabilities and entropies lose the last axis.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["GaussianHead"]

_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


class GaussianHead(nn.Module):
    """Independent normals with one learned standard deviation per number of the action."""

    def __init__(self, action_dim: int, log_std_init: float = -1.0) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.full((action_dim,), float(log_std_init)))

    def sample(self, mean: Tensor, *, deterministic: bool = False, generator: torch.Generator | None = None) -> Tensor:
        """The mean, or a draw around it."""
        if deterministic:
            return mean
        noise = torch.empty_like(mean).normal_(generator=generator)
        return mean + self.log_std.exp() * noise

    def evaluate(self, mean: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-density and entropy, one per action."""
        z = (actions - mean) * (-self.log_std).exp()
        log_prob = (-0.5 * z * z - self.log_std - _LOG_SQRT_2PI).sum(-1)
        entropy = (self.log_std + (0.5 + _LOG_SQRT_2PI)).sum().expand_as(log_prob)
        return log_prob, entropy
