"""Trajectories as tensors of bytes, so that they travel in a checkpoint beside the others. Nothing is pickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from palaestra.experience.trajectory import Trajectory

__all__ = ["packed", "unpacked"]


def packed(trajectories: Sequence[Trajectory], prefix: str) -> dict[str, Tensor]:
    """One tensor of bytes for each, under names that keep their order."""
    return {
        f"{prefix}.{number:06d}": torch.frombuffer(bytearray(one.to_bytes()), dtype=torch.uint8)
        for number, one in enumerate(trajectories)
    }


def unpacked(tensors: Mapping[str, Tensor], prefix: str) -> list[Trajectory]:
    """The trajectories under that prefix, in their order; each is checked against its digest."""
    names = sorted(name for name in tensors if name.startswith(f"{prefix}."))
    return [Trajectory.from_bytes(tensors[name].numpy().tobytes(), place=f"checkpoint, {name}") for name in names]
