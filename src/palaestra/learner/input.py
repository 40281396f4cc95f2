"""What `learn` was given, as plain tensors on the policy's device; refuses what is no rollout."""

from __future__ import annotations

from typing import Any

import torch

from palaestra.errors import ExperienceError
from palaestra.experience.columns import Columns

__all__ = ["columns_of", "moved"]


def columns_of(rollout: Any) -> Columns:
    """The entries of whatever `learn` was given as plain tensors; `ExperienceError` when it is no rollout."""
    from palaestra.experience.rollout import REQUIRED, Rollout

    if not hasattr(rollout, "keys"):
        raise ExperienceError(f"learn: expected a Rollout, got {type(rollout).__name__}.")
    missing = [key for key in REQUIRED if key not in rollout.keys()]
    if missing:
        raise ExperienceError(f"learn: the rollout has no {', '.join(missing)}. collect_rollouts gives all of them.")
    if isinstance(rollout, dict):
        return dict(rollout)
    if not isinstance(rollout, Rollout):
        rollout = Rollout(dict(rollout.items()), batch_size=rollout.batch_size)
    columns: Columns = rollout.columns()
    return columns


def moved(rollout: Columns, device: torch.device) -> Columns:
    """The same columns on another device; as they are when they are there."""
    if rollout["reward"].device == device:
        return rollout
    return {
        key: {name: part.to(device) for name, part in entry.items()} if isinstance(entry, dict) else entry.to(device)
        for key, entry in rollout.items()
    }
