"""Rollouts as plain tensors by key (`read_columns`), flattened to samples `[B, ...]`, cut into minibatches, and judged.

`learn` takes more than what our collectors write: a dictionary of made-up data or of another library's buffer may be
flat and lack columns that follow from others, which `read_columns` adds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from palaestra.errors import ConfigError, ExperienceError
from palaestra.experience.buffer import RolloutBuffer
from palaestra.experience.columns import PLURALS, REQUIRED, UNKNOWN_VERSION, Columns
from palaestra.policy.device import move_to

__all__ = ["TrainBatch", "evaluate_actions", "flatten_rollout", "join_batches", "minibatch", "read_columns"]

TrainBatch: TypeAlias = dict[str, Any]
"""Samples by key, `[B, ...]`: a rollout's entries flattened, plus what an algorithm adds, such as `advantage`."""

LEARNED_FROM = ("observation", "action", "log_prob", "value", "action_mask", "duration", "weight")


def map_entry(entry: Any, change: Callable[[Any], Any]) -> Any:
    """`change` applied to a column, or to every part of a nested one."""
    return {name: change(part) for name, part in entry.items()} if isinstance(entry, Mapping) else change(entry)


def list_parts(entry: Any) -> list[Any]:
    """The parts of a nested column, or the column itself."""
    return list(entry.values()) if isinstance(entry, Mapping) else [entry]


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
        columns = _complete_columns(columns)
    missing = [key for key in REQUIRED if key not in columns]
    if missing:
        raise ExperienceError(f"learn: the rollout has no {', '.join(missing)}. collect_rollouts gives all of them.")
    return {key: map_entry(entry, _without_graph) for key, entry in columns.items()}


def _complete_columns(given: Columns) -> Columns:
    """Data `[T, N]`, or one environment's `[n]` steps in order, with the columns that follow from the others.

    With `advantage` (or `target`, the return) it is learned from as it is. Else `next_value` is the value of the step
    after, and a last step that goes on gives its value and nothing else. What cannot be completed stays as it is.
    """
    try:
        columns = {key: map_entry(entry, _as_tensor) for key, entry in given.items()}
    except (TypeError, ValueError, RuntimeError):
        return given
    judged = "advantage" in columns or "target" in columns
    ends = {"done", "terminated", "truncated"} & set(columns)
    enough = {"value", "log_prob", "action", "observation"} | (set() if judged else {"reward"})
    if not enough <= set(columns) or not (judged or ends):
        return given
    value: Tensor = columns["value"]
    leading = [part.shape[: value.ndim] for entry in columns.values() for part in list_parts(entry)]
    if value.ndim not in (1, 2) or any(shape != value.shape for shape in leading):
        return given
    if value.ndim == 1:
        columns = {key: map_entry(entry, lambda part: part.unsqueeze(1)) for key, entry in columns.items()}
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
        columns = {key: map_entry(entry, lambda part: part[:-1]) for key, entry in columns.items()}
    following = torch.cat([value[1:], torch.zeros_like(value[:1])])[: len(columns["value"])]
    return {**columns, "next_value": following.where(~columns["terminated"], 0)}


def _as_tensor(part: Any) -> Tensor:
    tensor = torch.as_tensor(part)
    if tensor.is_nested or tensor.is_meta or tensor.layout is not torch.strided:
        raise TypeError("not a dense tensor")
    return tensor.float() if tensor.dtype is torch.float64 else tensor


def _without_graph(part: Any) -> Any:
    # A column that still hangs on the graph that computed it would be differentiated through. A negated view has no
    # memory that numpy can read.
    return part.detach().resolve_neg() if isinstance(part, Tensor) else part


def move_columns(rollout: Columns, device: torch.device) -> Columns:
    """The same columns on another device; as they are when they are there."""

    def move(part: Any) -> Any:
        return move_to(device, part) if isinstance(part, Tensor) else part

    return {key: map_entry(entry, move) for key, entry in rollout.items()}


def flatten_rollout(rollout: Columns, **columns: Tensor) -> TrainBatch:
    """The valid steps of a rollout `[T, N]`, and further columns of the same shape, as samples `[B]`."""
    entries: TrainBatch = {key: rollout[key] for key in LEARNED_FROM if key in rollout} | columns
    batch = {key: map_entry(entry, lambda part: part.flatten(0, 1)) for key, entry in entries.items()}
    if "valid" in rollout:
        keep = rollout["valid"].reshape(-1)
        batch = {key: map_entry(entry, lambda part: part[keep]) for key, entry in batch.items()}
    return batch


def num_samples(batch: TrainBatch) -> int:
    """B."""
    return len(batch["action"])


def minibatch(batch: TrainBatch, rows: Tensor) -> TrainBatch:
    """The given rows of a batch."""
    # Several times faster than `part[rows]`, which minibatches of images notice.
    return {key: map_entry(entry, lambda part: part.index_select(0, rows)) for key, entry in batch.items()}


def join_batches(batches: Sequence[TrainBatch]) -> TrainBatch:
    """Several prepared rollouts as one batch; each kept its own advantages.

    Samples without a weight weigh 1, and without a mask were free to act, beside others that have one.
    """
    if len(batches) == 1:
        return batches[0]
    keys = {key: None for batch in batches for key in batch}
    return {key: _concatenate([_entry(batch, key, batches) for batch in batches]) for key in keys}


def evaluate_actions(policy: Any, batch: TrainBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, entropy and value `[B]` of the samples under the policy as it is."""
    extra = {"duration": batch["duration"]} if "duration" in batch else {}
    result: tuple[Tensor, Tensor, Tensor] = policy.evaluate_actions(
        batch["observation"], batch["action"], mask=batch.get("action_mask"), **extra
    )
    size = (num_samples(batch),)
    if any(part.shape != size for part in result):  # `[B, 1]` against `[B]` would silently become `[B, B]`
        shapes = [list(part.shape) for part in result]
        reason = f"its evaluate_actions gave log_prob, entropy, value of shapes {shapes}"
        raise ConfigError("policy", type(policy).__name__, reason, f"Give each as {list(size)}")
    return result


def _concatenate(entries: list[Any]) -> Any:
    if isinstance(entries[0], Mapping):
        return {name: torch.cat([entry[name] for entry in entries]) for name in entries[0]}
    return torch.cat(entries)


def _entry(batch: TrainBatch, key: str, batches: Sequence[TrainBatch]) -> Any:
    if key in batch:
        return batch[key]
    if key not in ("weight", "action_mask"):
        raise ExperienceError(f"learn: only some of the rollouts have {key}. Learn from them one by one.")
    example = next(other[key] for other in batches if key in other)
    return example.new_ones((num_samples(batch), *example.shape[1:]))
