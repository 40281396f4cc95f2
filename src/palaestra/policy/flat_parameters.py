"""A policy's parameters as one vector, so that clipping and the optimiser are a single operation.

The parameters become views into the vector (and their gradients into a second one): modules, state dicts and the
compiled kernels share the same memory. There is one vector per policy, so that several trainers can share a policy. A
parameter that is frozen later keeps its place and its value; one that is unfrozen or replaced makes `refresh` build a
new vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn

from palaestra.errors import ConfigError


class FlatParameters:
    """One vector of weights, one of gradients, and the slice of each parameter group."""

    def __init__(self, groups: dict[str, list[nn.Parameter]], untrained: Sequence[nn.Parameter]) -> None:
        """`untrained`: the policy's other parameters, which are not part of the vector."""
        self.untrained = tuple(untrained)
        self._frozen = [p for p in self.untrained if not p.requires_grad]
        self.groups: dict[str, slice] = {}
        self._members: dict[str, list[tuple[nn.Parameter, slice]]] = {}
        at = 0
        for name, group in groups.items():
            start, self._members[name] = at, []
            for p in group:
                self._members[name].append((p, slice(at, at + p.numel())))
                at += p.numel()
            self.groups[name] = slice(start, at)
        self._parts = [part for members in self._members.values() for part in members]
        if not self._parts:
            reason = "every weight is frozen, so there is nothing to learn"
            remedy = "Set requires_grad=True on what should learn"
            raise ConfigError("policy", "no trainable parameter", reason, remedy)
        first, _ = self._parts[0]
        self.vector = torch.empty(at, dtype=first.dtype, device=first.device)
        self.gradient = torch.zeros_like(self.vector)
        with torch.no_grad():
            for p, part in self._parts:
                self.vector[part].copy_(p.detach().reshape(-1))
                p.data = self.vector[part].view(p.shape)
                p.grad = self.gradient[part].view(p.shape)

    @classmethod
    def of(cls, policy: nn.Module) -> FlatParameters:
        """The flat vector of a policy; rebuilt if its parameters were moved since."""
        known = _FLAT.get(policy)
        if known is None or not known._still_owns():
            groups = _groups(policy)
            trained = {id(p) for group in groups.values() for p in group}
            known = cls(groups, [p for p in policy.parameters() if id(p) not in trained])
            _FLAT[policy] = known
        return known

    @classmethod
    def refresh(cls, policy: nn.Module) -> FlatParameters:
        """Like `of`, and also rebuilds the vector if layers were replaced or unfrozen.

        Slower than `of`; call it once per update.
        """
        known = _FLAT.get(policy)
        if known is not None:
            owned = {id(p) for p, _ in known._parts}
            if any(id(p) not in owned for group in _groups(policy).values() for p in group):
                del _FLAT[policy]
        return cls.of(policy)

    def trainable(self, group: str) -> list[slice]:
        """Slices of the vector with the group's unfrozen parameters; adjacent ones are joined."""
        parts: list[slice] = []
        for p, part in self._members[group]:
            if p.requires_grad and parts and parts[-1].stop == part.start:
                parts[-1] = slice(parts[-1].start, part.stop)
            elif p.requires_grad:
                parts.append(part)
        return parts

    def members(self, group: str) -> list[nn.Parameter]:
        """The parameters of a group, in their order in the vector."""
        return [p for p, _ in self._members[group]]

    def _still_owns(self) -> bool:
        base, size = self.vector.data_ptr(), self.vector.element_size()
        if any(p.data_ptr() != base + part.start * size or p.grad is None for p, part in self._parts):
            return False
        return not any(p.requires_grad for p in self._frozen)


_FLAT: WeakKeyDictionary[nn.Module, FlatParameters] = WeakKeyDictionary()


def _groups(policy: nn.Module) -> dict[str, list[nn.Parameter]]:
    parameter_groups = getattr(policy, "parameter_groups", None)
    if parameter_groups is None:
        return {"policy": [p for p in policy.parameters() if p.requires_grad]}
    groups: dict[str, list[nn.Parameter]] = parameter_groups()
    return groups
