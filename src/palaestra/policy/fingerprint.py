"""Fingerprints of weights: equal weights have the same fingerprint, and any optimiser step changes it.

Experience records the fingerprint beside the policy version. Two policies can have the same version; the fingerprint
identifies the weights that acted. It is not a signature: a program that can edit experience can copy a fingerprint.
`policy_fingerprint` is an integer over all parameters of a policy, for the columns of a rollout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from palaestra.policy.flat_parameters import FlatParameters

MAX_HASHED = 2**20
"""Maximum number of elements hashed per tensor. Of larger tensors evenly spaced elements are hashed: an optimiser step
changes nearly all of them, and hashing billions would take longer than the step."""


def weights_fingerprint(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, shapes, dtypes and values, sorted by name; 64 hexadecimal digits."""
    total = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach()
        flat = tensor.reshape(-1)
        if flat.numel() > MAX_HASHED:
            flat = flat[:: -(-flat.numel() // MAX_HASHED)]
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        total.update(flat.contiguous().cpu().view(torch.uint8).numpy().data)
    return total.hexdigest()


_UNTRAINED: WeakKeyDictionary[nn.Module, tuple[tuple[tuple[int, int], ...], int]] = WeakKeyDictionary()
"""Hash of the frozen weights by policy, and the state it belongs to, so that they are hashed once."""


def policy_fingerprint(policy: nn.Module) -> int:
    """The fingerprint of all current parameters, between 1 and 2**60.

    Buffers are excluded: some networks change theirs in every forward pass.
    """
    if not any(p.requires_grad for p in policy.parameters()):
        # A policy that only acts has no flat vector of trained weights.
        return _hash_untrained(policy, tuple(policy.parameters())) or 1
    flat = FlatParameters.of(policy)
    number = _hash({"trained": flat.vector}) ^ _hash_untrained(policy, flat.untrained)
    return number or 1  # 0 stands for "not recorded"


def _hash_untrained(policy: nn.Module, untrained: Sequence[Tensor]) -> int:
    if not untrained:
        return 0
    # torch counts in-place changes; tensors created in inference mode have no counter.
    state = tuple((p.data_ptr(), -1 if p.is_inference() else p._version) for p in untrained)
    cached = _UNTRAINED.get(policy)
    if cached is None or cached[0] != state:
        cached = state, _hash({f"untrained.{i:06d}": p for i, p in enumerate(untrained)})
        _UNTRAINED[policy] = cached
    return cached[1]


def _hash(weights: Mapping[str, Tensor]) -> int:
    return int(weights_fingerprint(weights)[:15], 16)
