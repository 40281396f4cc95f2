"""A fingerprint of weights: equal weights have the same one, and any optimiser step changes it.

Experience records it beside the policy version. A version is a counter that two policies can share; the fingerprint
says which weights acted. It is not a signature: a program that can edit the experience can copy a fingerprint into it.
`policy_fingerprint` is the same as one number, over all parameters of a policy, for the columns of a rollout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from palaestra.policy.flat_parameters import FlatParameters

__all__ = ["policy_fingerprint", "weights_fingerprint"]

LARGEST = 2**20
"""Numbers of one tensor that are hashed. Of a larger tensor this many, evenly spread, are: an optimiser step moves
nearly all of them, and hashing a model of billions whole would take longer than the step."""


def weights_fingerprint(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, shapes, dtypes and numbers, in the order of the names; 64 hexadecimal digits."""
    total = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach()
        flat = tensor.reshape(-1)
        if flat.numel() > LARGEST:
            flat = flat[:: -(-flat.numel() // LARGEST)]
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        total.update(flat.contiguous().cpu().view(torch.uint8).numpy().data)
    return total.hexdigest()


_UNTRAINED: WeakKeyDictionary[nn.Module, tuple[tuple[tuple[int, int], ...], int]] = WeakKeyDictionary()
"""The number of the weights that do not learn, by policy, and the state it belongs to: they are hashed once."""


def policy_fingerprint(policy: nn.Module) -> int:
    """The fingerprint of all parameters as they are now; positive, below 2**60.

    Buffers are left out: some networks change theirs in every forward pass.
    """
    if not any(p.requires_grad for p in policy.parameters()):
        # It can act, and has no vector of trained weights.
        return _number_of_untrained(policy, tuple(policy.parameters())) or 1
    flat = FlatParameters.of(policy)
    number = _number({"trained": flat.vector}) ^ _number_of_untrained(policy, flat.untrained)
    return number or 1  # 0 stands for "not recorded"


def _number_of_untrained(policy: nn.Module, untrained: Sequence[Tensor]) -> int:
    if not untrained:
        return 0
    # torch counts changes in place; a tensor made in inference mode has no such counter.
    state = tuple((p.data_ptr(), -1 if p.is_inference() else p._version) for p in untrained)
    known = _UNTRAINED.get(policy)
    if known is None or known[0] != state:
        known = state, _number({f"untrained.{i:06d}": p for i, p in enumerate(untrained)})
        _UNTRAINED[policy] = known
    return known[1]


def _number(weights: Mapping[str, Tensor]) -> int:
    return int(weights_fingerprint(weights)[:15], 16)
