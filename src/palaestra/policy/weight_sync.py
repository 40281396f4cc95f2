"""Copies of a policy, in this process or another, and the arrays that keep them up to date.

`LiveWeights` lists the arrays that change (trained weights as one vector, then buffers such as normaliser statistics).
`clone_policy` copies a policy within a process and shares its frozen weights. `serialize_structure` and
`deserialize_structure` move it to another process: the structure is pickled, the tensors are in shared memory.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from palaestra.errors import ConfigError
from palaestra.policy.flat_parameters import FlatParameters


class LiveWeights:
    """The arrays of a policy that change in training."""

    def __init__(self, policy: nn.Module) -> None:
        self._policy = policy
        self._tensors: list[Tensor] = []
        self._find_tensors()

    def _find_tensors(self) -> None:
        """Find the tensors again: a policy may have replaced them (`zero_grad`, a reassigned buffer)."""
        tensors = [FlatParameters.of(self._policy).vector, *self._policy.buffers()]
        if len(tensors) == len(self._tensors) and all(a is b for a, b in zip(tensors, self._tensors, strict=True)):
            return
        self._tensors = tensors
        self._in_place = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)
        self._copies = [_as_bytes(tensor.detach().cpu()) for tensor in tensors]

    def read(self) -> list[NDArray[Any]]:
        """The current arrays. On the CPU they are the policy's own memory: copy them to keep them."""
        self._find_tensors()
        if not self._in_place:
            for mine, tensor in zip(self._copies, self._tensors, strict=True):
                np.copyto(mine, _as_bytes(tensor.detach().cpu()))
        return self._copies

    def write(self, fill: Callable[[Sequence[NDArray[Any]]], int]) -> int:
        """Call `fill` to write new values; returns their version."""
        self._find_tensors()
        version = fill(self._copies)
        if not self._in_place:
            for mine, tensor in zip(self._copies, self._tensors, strict=True):
                tensor.copy_(torch.from_numpy(mine).view(tensor.dtype).view(tensor.shape))
        return version


def clone_policy(policy: nn.Module, device: torch.device | None = None) -> nn.Module:
    """Copy a policy in the same memory layout; frozen weights are shared, unless the copy is on another device."""
    flat = FlatParameters.of(policy)
    untrained = {id(p) for p in flat.untrained}
    elsewhere = device is not None and device != flat.vector.device
    shared: dict[int, Any] = {id(p): p for p in flat.untrained if not p.requires_grad and not elsewhere}
    copied = copy.deepcopy(policy, shared)
    if elsewhere:
        copied.to(device)
    for mine, theirs in zip(policy.parameters(), copied.parameters(), strict=True):
        if id(mine) not in untrained:
            theirs.requires_grad_(True)  # weights that were frozen later are part of the vector, too
    return copied


def serialize_structure(policy: nn.Module) -> bytes:
    """Pickle the structure of a policy without its tensors, for a process that can import its class."""
    index = {id(tensor): number for number, tensor in enumerate(policy_tensors(policy))}

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            return index.get(id(obj)) if isinstance(obj, Tensor) else None

    file = io.BytesIO()
    try:
        Pickler(file).dump(policy)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        reason = f"cannot be sent to a collector process ({error})"
        remedy = "Define its class at the top of an importable module, or collect in a thread: trainer.collector=thread"
        raise ConfigError("policy", type(policy).__name__, reason, remedy) from error
    return file.getvalue()


def deserialize_structure(structure: bytes, tensors: Sequence[Tensor]) -> nn.Module:
    """Rebuild a policy from `serialize_structure`, with the given tensors."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: int) -> Tensor:
            return tensors[pid]

    policy: nn.Module = Unpickler(io.BytesIO(structure)).load()
    return policy


def policy_tensors(policy: nn.Module) -> list[Tensor]:
    """All parameters and buffers, in a fixed order."""
    return [*policy.parameters(), *policy.buffers()]


def _as_bytes(tensor: Tensor) -> NDArray[Any]:
    # As bytes, because numpy has no bfloat16.
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def copy_weights(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Copy values by name into `target`, which may contain more; into sharded tensors, whole ones are distributed."""
    with torch.no_grad():
        for name, value in source.items():
            copy_tensor(value, target[name])


def copy_tensor(value: Tensor, target: Tensor) -> None:
    """Copy a whole tensor into a whole or a sharded one. In the latter case all processes call it."""
    target.copy_(distribute_like(value, target) if is_sharded(target) else value)


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process has only a part of the tensor."""
    return hasattr(tensor, "full_tensor")


def whole_tensor(tensor: Tensor) -> Tensor:
    """The tensor with the parts of all processes, which all call this; whole tensors are returned as they are."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def own_part(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor in this process, in its own memory; whole tensors are returned as they are."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def distribute_like(value: Tensor, example: Any) -> Tensor:
    """This process's part of a whole tensor, placed like `example`."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(example.device, example.dtype), example.device_mesh, example.placements)
