"""What `learn` was given, as plain tensors on the policy's device; refuses what is no rollout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from palaestra.errors import ExperienceError
from palaestra.experience.buffer import RolloutBuffer
from palaestra.experience.columns import Columns
from palaestra.policy.device import move_to

__all__ = ["move_columns", "read_columns"]


def read_columns(rollout: Any) -> Columns:
    """The entries of whatever `learn` was given as plain tensors; `ExperienceError` when it is no rollout."""
    if isinstance(rollout, RolloutBuffer):
        # A buffer of ours is read where it is: tensordict takes over a second to import.
        return rollout.columns()
    from palaestra.experience.rollout import REQUIRED, Rollout

    if not hasattr(rollout, "keys"):
        raise ExperienceError(f"learn: expected a Rollout, got {type(rollout).__name__}.")
    missing = [key for key in REQUIRED if key not in rollout.keys()]
    if missing:
        raise ExperienceError(f"learn: the rollout has no {', '.join(missing)}. collect_rollouts gives all of them.")
    if isinstance(rollout, dict):
        columns = dict(rollout)
        if hasattr(columns["observation"], "keys"):
            columns["observation"] = {str(key): columns["observation"][key] for key in columns["observation"].keys()}
    else:
        if not isinstance(rollout, Rollout):
            rollout = Rollout(dict(rollout.items()), batch_size=rollout.batch_size)
        columns = rollout.columns()
    return {key: _each(entry, _without_graph) for key, entry in columns.items()}


def move_columns(rollout: Columns, device: torch.device) -> Columns:
    """The same columns on another device; as they are when they are there."""

    def move(part: Any) -> Any:
        return move_to(device, part) if isinstance(part, Tensor) else part

    return {key: _each(entry, move) for key, entry in rollout.items()}


def _without_graph(part: Any) -> Any:
    # A column that still hangs on the graph that computed it would be differentiated through. A negated view has no
    # memory that numpy can read.
    return part.detach().resolve_neg() if isinstance(part, Tensor) else part


def _each(entry: Any, change: Callable[[Any], Any]) -> Any:
    return {name: change(part) for name, part in entry.items()} if isinstance(entry, dict) else change(entry)
