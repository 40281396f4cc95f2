"""Samples to learn from: rollouts flattened to `[B, ...]` by key, cut into minibatches, and judged by a policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from palaestra.errors import ConfigError, ExperienceError
from palaestra.experience.columns import Columns

__all__ = ["TrainBatch", "evaluate_actions", "flatten_rollout", "join_batches", "map_entry", "minibatch", "num_samples"]

TrainBatch: TypeAlias = dict[str, Any]
"""Samples by key, `[B, ...]`: a rollout's entries flattened, plus what an algorithm adds, such as `advantage`."""

LEARNED_FROM = ("observation", "action", "log_prob", "value", "action_mask", "duration", "weight")


def map_entry(entry: Any, change: Callable[[Any], Any]) -> Any:
    """`change` applied to a column, or to every part of a nested one."""
    if isinstance(entry, Mapping):
        return {name: change(part) for name, part in entry.items()}
    return change(entry)


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
        raise ConfigError(
            "policy",
            type(policy).__name__,
            f"its evaluate_actions gave log_prob, entropy, value of shapes {shapes}",
            f"Give each as {list(size)}",
        )
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
