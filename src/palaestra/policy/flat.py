"""A policy's parameters as one vector, so that clipping and the optimiser are a single operation.

The parameters become views into the vector (and their gradients into a second one): modules, state dicts and the
compiled kernels all see the same memory. The vector belongs to the policy, not to whoever asked first, so that
several trainers can share a policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
from torch import nn

__all__ = ["FlatParameters"]


class FlatParameters:
    """One vector of weights, one of gradients, and which slice belongs to which group."""

    def __init__(self, groups: dict[str, list[nn.Parameter]]) -> None:
        self._parameters = [p for group in groups.values() for p in group]
        self.groups: dict[str, slice] = {}
        at = 0
        for name, group in groups.items():
            size = sum(p.numel() for p in group)
            self.groups[name] = slice(at, at + size)
            at += size
        first = self._parameters[0]
        self.vector = torch.empty(at, dtype=first.dtype, device=first.device)
        self.gradient = torch.zeros_like(self.vector)
        self._adopt()

    @classmethod
    def of(cls, policy: nn.Module) -> FlatParameters:
        """The policy's one and only flat vector, made anew if something moved its parameters since."""
        known = _FLAT.get(policy)
        if known is None or not known._still_owns():
            known = cls(_groups(policy))
            _FLAT[policy] = known
        return known

    def _adopt(self) -> None:
        with torch.no_grad():
            for p, (low, high) in zip(self._parameters, self._spans(), strict=True):
                self.vector[low:high].copy_(p.detach().reshape(-1))
                p.data = self.vector[low:high].view(p.shape)
                p.grad = self.gradient[low:high].view(p.shape)

    def _spans(self) -> Iterable[tuple[int, int]]:
        at = 0
        for p in self._parameters:
            yield at, at + p.numel()
            at += p.numel()

    def _still_owns(self) -> bool:
        base, size = self.vector.data_ptr(), self.vector.element_size()
        for p, (low, _) in zip(self._parameters, self._spans(), strict=True):
            if p.data_ptr() != base + low * size or p.grad is None:
                return False
        return True


_FLAT: WeakKeyDictionary[nn.Module, FlatParameters] = WeakKeyDictionary()


def _groups(policy: nn.Module) -> dict[str, list[nn.Parameter]]:
    grouped = getattr(policy, "parameter_groups", None)
    if grouped is None:
        return {"policy": [p for p in policy.parameters() if p.requires_grad]}
    result: dict[str, list[nn.Parameter]] = grouped()
    return result
