"""Adam on one flat parameter vector."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from palaestra.kernels.ppo import adam_step
from palaestra.policy.flat_parameters import FlatParameters

BETA_1, BETA_2 = 0.9, 0.999


class Adam:
    """Adam by parameter group. Its state is plain tensors, shared with checkpoints and kernels.

    A step skips frozen weights: they have no gradient, but would still move along their momentum. `compiled` takes
    the step in one pass over memory instead of six, which matters for networks of millions of weights.
    """

    def __init__(self, flat: FlatParameters, eps: float, *, compiled: bool = False) -> None:
        self.flat = flat
        self.first = torch.zeros_like(flat.vector)
        self.second = torch.zeros_like(flat.vector)
        self.steps = dict.fromkeys(flat.groups, 0)
        self.eps = eps
        self._allows_kernel = compiled
        self._compiled = compiled and flat.vector.device.type == "cpu" and flat.vector.dtype == torch.float32

    def rebuild(self, flat: FlatParameters) -> Adam:
        """The optimiser for the same policy after its parameters were laid out in another vector.

        A group with the same parameters keeps its moments. A group that gained or lost parameters starts from zero: its
        step count applies to all of them, and would make the first steps of new ones several times too large.
        """
        new = Adam(flat, self.eps, compiled=self._allows_kernel)
        for group, part in flat.groups.items():
            old = self.flat.groups.get(group)
            if old is None or [id(p) for p in flat.members(group)] != [id(p) for p in self.flat.members(group)]:
                continue
            new.first[part].copy_(self.first[old])
            new.second[part].copy_(self.second[old])
            new.steps[group] = self.steps[group]
        return new

    @torch.no_grad()
    def step(self, group: str, parts: Sequence[slice], rate: float, gradient_scale: float) -> None:
        """Update the trainable `parts` of one group with the gradient times `gradient_scale`."""
        if not parts:
            return
        self.steps[group] += 1
        for part in parts:
            self._step(part, self.steps[group], rate, gradient_scale)

    def _step(self, part: slice, t: int, rate: float, gradient_scale: float) -> None:
        weights, gradient = self.flat.vector[part], self.flat.gradient[part]
        first, second = self.first[part], self.second[part]
        if self._compiled:
            numbers = (np.float32(rate), np.float32(gradient_scale), np.float32(self.eps), t)
            adam_step(*(vector.numpy() for vector in (weights, gradient, first, second)), *numbers)
            return
        if gradient_scale != 1.0:
            gradient = gradient * gradient_scale
        first.lerp_(gradient, 1.0 - BETA_1)
        second.mul_(BETA_2).addcmul_(gradient, gradient, value=1.0 - BETA_2)
        denominator = second.sqrt().div_(math.sqrt(1.0 - BETA_2**t)).add_(self.eps)
        weights.addcdiv_(first, denominator, value=-rate / (1.0 - BETA_1**t))
