"""Rollouts as plain tensors by key (`read_columns`), and training batches: samples `[B, ...]` by key.

`learn` also accepts plain dictionaries, for example from another library's buffer. They may be flat and lack columns
that follow from others; `read_columns` adds those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from palaestra.errors import ConfigError, ExperienceError
from palaestra.experience.buffer import RolloutBuffer
from palaestra.experience.columns import PLURALS, REQUIRED, UNKNOWN_VERSION, Columns, column_parts, map_column
from palaestra.policy.device import move_to

TrainBatch: TypeAlias = dict[str, Any]
"""Samples `[B, ...]` by key: a flattened rollout, plus columns of the algorithm such as `advantage`."""

SAMPLE_COLUMNS = ("observation", "action", "log_prob", "value", "action_mask", "duration", "weight")


def read_columns(rollout: Any) -> Columns:
    """The entries of a rollout as plain tensors; `ExperienceError` if it is not a rollout."""
    if isinstance(rollout, RolloutBuffer):
        # Read directly: importing tensordict takes over a second.
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
    # A collector records `stream`; only other data is completed.
    if isinstance(rollout, dict) and "stream" not in columns:
        columns = _complete_columns(columns)
    missing = [key for key in REQUIRED if key not in columns]
    if missing:
        raise ExperienceError(f"learn: the rollout has no {', '.join(missing)}. collect_rollouts records all of them.")
    return {key: map_column(entry, _without_graph) for key, entry in columns.items()}


def _complete_columns(given: Columns) -> Columns:
    """Add the columns that follow from the others to data `[T, N]`, or `[n]` consecutive steps of one environment.

    Data with `advantage` (or `target`, the return) is used directly. Otherwise `next_value` is the value of the next
    step, and a last step that is not terminal only provides its value. Data that cannot be completed is returned as is.
    """
    try:
        columns = {key: map_column(entry, _as_tensor) for key, entry in given.items()}
    except (TypeError, ValueError, RuntimeError):
        return given
    has_advantage = "advantage" in columns or "target" in columns
    ends = {"done", "terminated", "truncated"} & set(columns)
    needed = {"value", "log_prob", "action", "observation"} | (set() if has_advantage else {"reward"})
    if not needed <= set(columns) or not (has_advantage or ends):
        return given
    value: Tensor = columns["value"]
    leading = [part.shape[: value.ndim] for entry in columns.values() for part in column_parts(entry)]
    if value.ndim not in (1, 2) or any(shape != value.shape for shape in leading):
        return given
    if value.ndim == 1:
        columns = {key: map_column(entry, lambda part: part.unsqueeze(1)) for key, entry in columns.items()}
        value = columns["value"]
    never = torch.zeros_like(value, dtype=torch.bool)
    done = columns.pop("done", never) != 0
    for key, other in (("terminated", "truncated"), ("truncated", "terminated")):
        # `done` alone means terminated.
        columns[key] = columns[key] != 0 if key in columns else done & ~(columns.get(other, never) != 0)
    columns.setdefault("policy_version", torch.full_like(value, UNKNOWN_VERSION, dtype=torch.int64))
    if has_advantage:
        columns.setdefault("advantage", columns.get("target", value) - value)
        columns.setdefault("target", columns["advantage"] + value)
        return {"reward": torch.zeros_like(value), "next_value": torch.zeros_like(value), **columns}
    return columns if "next_value" in columns else _with_next_value(columns)


def _with_next_value(columns: Columns) -> Columns:
    value, terminated = columns["value"], columns["terminated"]
    if bool((columns["truncated"] & ~terminated).any()):
        raise ExperienceError(
            "learn: the rollout has truncated steps and no next_value. Add the value of the observation after each."
        )
    if not bool(terminated[-1].all()):
        if len(value) < 2:
            raise ExperienceError("learn: a single, non-terminal step without next_value. Give at least two steps.")
        columns = {key: map_column(entry, lambda part: part[:-1]) for key, entry in columns.items()}
    following = torch.cat([value[1:], torch.zeros_like(value[:1])])[: len(columns["value"])]
    return {**columns, "next_value": following.where(~columns["terminated"], 0)}


def _as_tensor(part: Any) -> Tensor:
    tensor = torch.as_tensor(part)
    if tensor.is_nested or tensor.is_meta or tensor.layout is not torch.strided:
        raise TypeError("not a dense tensor")
    return tensor.float() if tensor.dtype is torch.float64 else tensor


def _without_graph(part: Any) -> Any:
    # Detached, so that no gradient flows into the rollout. numpy cannot read the memory of a negated view.
    return part.detach().resolve_neg() if isinstance(part, Tensor) else part


def move_columns(rollout: Columns, device: torch.device) -> Columns:
    """The columns on `device`; not copied if they are already there."""

    def move(part: Any) -> Any:
        return move_to(device, part) if isinstance(part, Tensor) else part

    return {key: map_column(entry, move) for key, entry in rollout.items()}


def flatten_rollout(rollout: Columns, **columns: Tensor) -> TrainBatch:
    """The valid steps of a rollout `[T, N]` and of further columns of the same shape, as samples `[B]`."""
    entries: TrainBatch = {key: rollout[key] for key in SAMPLE_COLUMNS if key in rollout} | columns
    batch = {key: map_column(entry, lambda part: part.flatten(0, 1)) for key, entry in entries.items()}
    if "valid" in rollout:
        keep = rollout["valid"].reshape(-1)
        batch = {key: map_column(entry, lambda part: part[keep]) for key, entry in batch.items()}
    return batch


def num_samples(batch: TrainBatch) -> int:
    """The number of samples."""
    return len(batch["action"])


def minibatch(batch: TrainBatch, rows: Tensor) -> TrainBatch:
    """The given rows of a batch."""
    # Several times faster than `part[rows]`, which matters for images.
    return {key: map_column(entry, lambda part: part.index_select(0, rows)) for key, entry in batch.items()}


def concatenate_batches(batches: Sequence[TrainBatch]) -> TrainBatch:
    """Several prepared rollouts as one batch.

    If only some have a `weight` or an `action_mask`, the others get weight 1 and a mask that allows every action.
    """
    if len(batches) == 1:
        return batches[0]
    keys = {key: None for batch in batches for key in batch}
    return {key: _concatenate([_entry(batch, key, batches) for batch in batches]) for key in keys}


def evaluate_actions(policy: Any, batch: TrainBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, entropy and value `[B]` of the samples under the present policy."""
    extra = {"duration": batch["duration"]} if "duration" in batch else {}
    result: tuple[Tensor, Tensor, Tensor] = policy.evaluate_actions(
        batch["observation"], batch["action"], mask=batch.get("action_mask"), **extra
    )
    size = (num_samples(batch),)
    if any(part.shape != size for part in result):  # `[B, 1]` and `[B]` would silently broadcast to `[B, B]`
        shapes = [list(part.shape) for part in result]
        reason = f"its evaluate_actions returned log_prob, entropy, value of shapes {shapes}"
        raise ConfigError("policy", type(policy).__name__, reason, f"Return each as {list(size)}")
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
