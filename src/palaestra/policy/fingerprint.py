"""A fingerprint of weights: equal weights have the same one, and any optimiser step changes it.

Experience records it beside the policy version. A version is a counter that two policies can share; the fingerprint
says which weights acted. It is no signature: whoever can edit the experience can copy a fingerprint into it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["weights_fingerprint"]

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
