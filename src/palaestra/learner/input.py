"""What `learn` was given, as plain tensors on the policy's device; refuses what is no rollout.

A dictionary that was not collected here (fake data of a test, another library's buffer) may be flat and lack columns
that follow from others: `complete_columns` adds them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from palaestra.errors import ExperienceError
from palaestra.experience.buffer import RolloutBuffer
from palaestra.experience.columns import PLURALS, REQUIRED, UNKNOWN_VERSION, Columns
from palaestra.policy.device import move_to

__all__ = ["complete_columns", "move_columns", "read_columns"]


def read_columns(rollout: Any) -> Columns:
    """The entries of whatever `learn` was given as plain tensors; `ExperienceError` when it is no rollout."""
    if isinstance(rollout, RolloutBuffer):
        # A buffer of ours is read where it is: tensordict takes over a second to import.
        return rollout.columns()
    if not hasattr(rollout, "keys"):
        raise ExperienceError(f"learn: expected a Rollout, got {type(rollout).__name__}.")
    columns: Columns = {}
    for name in rollout.keys():
        key = PLURALS.get(name, name)
        if key in columns:
            raise ExperienceError(f"learn: the rollout has {key} twice, once as {name}. Keep one of them.")
        entry = rollout[name]
        columns[key] = {str(part): entry[part] for part in entry.keys()} if hasattr(entry, "keys") else entry
    # What a collector wrote names its streams, and is checked as it is.
    if isinstance(rollout, dict) and "stream" not in columns:
        columns = complete_columns(columns)
    missing = [key for key in REQUIRED if key not in columns]
    if missing:
        raise ExperienceError(f"learn: the rollout has no {', '.join(missing)}. collect_rollouts gives all of them.")
    return {key: _each(entry, _without_graph) for key, entry in columns.items()}


def complete_columns(given: Columns) -> Columns:
    """Data `[T, N]`, or one environment's `[n]` steps in order, with the columns that follow from the others.

    With `advantage` (or `target`, the return) it is learned from as it is. Else `next_value` is the value of the step
    after, and a last step that goes on gives its value and nothing else. What cannot be completed stays as it is.
    """
    try:
        columns = {key: _each(entry, _as_tensor) for key, entry in given.items()}
    except (TypeError, ValueError, RuntimeError):
        return given
    judged = "advantage" in columns or "target" in columns
    ends = {"done", "terminated", "truncated"} & set(columns)
    enough = {"value", "log_prob", "action", "observation"} | (set() if judged else {"reward"})
    if not enough <= set(columns) or not (judged or ends):
        return given
    value: Tensor = columns["value"]
    leading = [part.shape[: value.ndim] for entry in columns.values() for part in _parts(entry)]
    if value.ndim not in (1, 2) or any(shape != value.shape for shape in leading):
        return given
    if value.ndim == 1:
        columns = {key: _each(entry, lambda part: part.unsqueeze(1)) for key, entry in columns.items()}
        value = columns["value"]
    never = torch.zeros_like(value, dtype=torch.bool)
    done = columns.pop("done", never) != 0
    for key, other in (("terminated", "truncated"), ("truncated", "terminated")):
        # `done` alone says that the task ended.
        columns[key] = columns[key] != 0 if key in columns else done & ~(columns.get(other, never) != 0)
    columns.setdefault("policy_version", torch.full_like(value, UNKNOWN_VERSION, dtype=torch.int64))
    if judged:
        columns.setdefault("advantage", columns.get("target", value) - value)
        columns.setdefault("target", columns["advantage"] + value)
        return {"reward": torch.zeros_like(value), "next_value": torch.zeros_like(value), **columns}
    return columns if "next_value" in columns else _with_next_value(columns)


def _with_next_value(columns: Columns) -> Columns:
    value, terminated = columns["value"], columns["terminated"]
    if bool((columns["truncated"] & ~terminated).any()):
        raise ExperienceError(
            "learn: steps are truncated, and the rollout has no next_value: the value of what they led to is not known."
        )
    if not bool(terminated[-1].all()):
        if len(value) < 2:
            raise ExperienceError("learn: one step that goes on, and no next_value. Give at least two steps.")
        columns = {key: _each(entry, lambda part: part[:-1]) for key, entry in columns.items()}
    following = torch.cat([value[1:], torch.zeros_like(value[:1])])[: len(columns["value"])]
    return {**columns, "next_value": following.where(~columns["terminated"], 0)}


def move_columns(rollout: Columns, device: torch.device) -> Columns:
    """The same columns on another device; as they are when they are there."""

    def move(part: Any) -> Any:
        return move_to(device, part) if isinstance(part, Tensor) else part

    return {key: _each(entry, move) for key, entry in rollout.items()}


def _as_tensor(part: Any) -> Tensor:
    tensor = torch.as_tensor(part)
    if tensor.is_nested or tensor.is_meta or tensor.layout is not torch.strided:
        raise TypeError("not a dense tensor")
    return tensor.float() if tensor.dtype is torch.float64 else tensor


def _without_graph(part: Any) -> Any:
    # A column that still hangs on the graph that computed it would be differentiated through. A negated view has no
    # memory that numpy can read.
    return part.detach().resolve_neg() if isinstance(part, Tensor) else part


def _parts(entry: Any) -> list[Any]:
    return list(entry.values()) if isinstance(entry, dict) else [entry]


def _each(entry: Any, change: Callable[[Any], Any]) -> Any:
    return {name: change(part) for name, part in entry.items()} if isinstance(entry, dict) else change(entry)
