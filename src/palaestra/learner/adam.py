"""Adam on one flat vector, group by group: its state is plain tensors that a checkpoint and the kernels can share.

`compiled` takes the step in one pass over memory instead of six, which a network of millions of weights notices.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from palaestra.learner.kernels import adam_step
from palaestra.policy.flat import FlatParameters

__all__ = ["Adam"]

BETA_1, BETA_2 = 0.9, 0.999


class Adam:
    """First and second moments of a policy's gradients, and how many steps each group has taken."""

    def __init__(self, flat: FlatParameters, eps: float, *, compiled: bool = False) -> None:
        self.first = torch.zeros_like(flat.vector)
        self.second = torch.zeros_like(flat.vector)
        self.steps = dict.fromkeys(flat.groups, 0)
        self.eps = eps
        self._compiled = compiled and flat.vector.device.type == "cpu" and flat.vector.dtype == torch.float32

    @torch.no_grad()
    def step(self, flat: FlatParameters, group: str, rate: float, shrink: float) -> None:
        """Move one group of parameters along its gradient times `shrink`."""
        part = flat.groups[group]
        gradient = flat.gradient[part]
        if self._compiled:
            self.steps[group] += 1
            vectors = (flat.vector[part], gradient, self.first[part], self.second[part])
            numbers = (np.float32(rate), np.float32(shrink), np.float32(self.eps), self.steps[group])
            adam_step(*(vector.numpy() for vector in vectors), *numbers)
            return
        if shrink != 1.0:
            gradient = gradient * shrink
        first, second = self.first[part], self.second[part]
        first.lerp_(gradient, 1.0 - BETA_1)
        second.mul_(BETA_2).addcmul_(gradient, gradient, value=1.0 - BETA_2)
        self.steps[group] += 1
        t = self.steps[group]
        denominator = second.sqrt().div_(math.sqrt(1.0 - BETA_2**t)).add_(self.eps)
        flat.vector[part].addcdiv_(first, denominator, value=-rate / (1.0 - BETA_1**t))
