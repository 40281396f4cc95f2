"""The columns of a rollout: names, shapes and types, and their validation.

Compiled kernels check no bounds: an observation of the wrong shape or an invalid action would access other memory.
`check_columns` validates every column before a kernel reads it, at the cost of a few passes over memory per rollout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palaestra.errors import ExperienceError, NonFiniteError

Columns: TypeAlias = dict[str, Any]
"""A rollout as plain tensors `[T, N, ...]`, by the keys of a `Rollout`; `observation` may be a dict of tensors."""

NO_FINGERPRINT = 0
"""The `policy_fingerprint` of a step without one."""

UNKNOWN_VERSION = -1
"""The `policy_version` of a step without one; it counts as fresh."""

PLURALS = {
    **{f"{name}s": name for name in ("observation", "action", "reward", "value", "next_value", "log_prob")},
    **{"action_masks": "action_mask", "dones": "done", "advantages": "advantage", "returns": "target"},
}
"""Names of the columns in other libraries, accepted when a rollout is read."""

REQUIRED = "observation action log_prob value next_value reward terminated truncated policy_version".split()

_TYPES = {
    **dict.fromkeys(("log_prob", "value", "next_value", "reward"), torch.float32),
    **dict.fromkeys(("reward_scale", "weight", "advantage", "target"), torch.float32),
    **dict.fromkeys(("terminated", "truncated", "valid"), torch.bool),
    **dict.fromkeys(("policy_version", "policy_fingerprint", "stream", "env_step"), torch.int64),
}
"""Columns `[T, N]` and their types."""

_NUMBERS = (*(key for key, dtype in _TYPES.items() if dtype is torch.float32), "action")


@dataclass(frozen=True)
class ArraySpec:
    """Shape and type of one step of one environment."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


ObservationSpec: TypeAlias = ArraySpec | Mapping[str, ArraySpec]


@dataclass(frozen=True)
class RolloutSpec:
    """Shapes, types and ranges of the columns for one policy and environment."""

    observation: ObservationSpec
    action: ArraySpec
    choices: tuple[int, ...] | None = None
    """Number of values of each discrete action; None for continuous actions."""
    mask_size: int = 0
    """Length of an action mask; 0: actions cannot be masked."""
    needs_mask: bool = False
    """Whether the environment masks actions."""
    chunk: int = 1
    """Actions per decision."""
    bounds: Mapping[str, tuple[NDArray[Any], NDArray[Any]]] = field(default_factory=dict)
    """Lowest and highest value of discrete observations, by column."""


def map_column(entry: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to a column, or to every part of a nested one."""
    return {name: change(part) for name, part in entry.items()} if isinstance(entry, Mapping) else change(entry)


def column_parts(entry: Any) -> list[Any]:
    """The parts of a nested column, or the column itself."""
    return list(entry.values()) if isinstance(entry, Mapping) else [entry]


def check_columns(columns: Columns, spec: RolloutSpec) -> None:
    """Raise `ExperienceError` or `NonFiniteError` for the first invalid column."""
    shape = _leading_shape(columns)
    for key, dtype in _TYPES.items():
        if key in columns or key in REQUIRED:
            _check_type(key, columns[key], shape, dtype)
    parts = _observation_parts(columns["observation"], spec)
    for key, value, part in parts:
        _check_type(key, value, (*shape, *part.shape), _torch_type(part.dtype))
    _check_type("action", columns["action"], (*shape, *spec.action.shape), _torch_type(spec.action.dtype))
    numbers = [(key, columns[key]) for key in _NUMBERS if key in columns]
    numbers += [(key, value) for key, value, _ in parts]
    with np.errstate(over="ignore", invalid="ignore"):
        for key, value in numbers:
            if value.dtype is torch.float32:
                _check_finite(key, value)
    _check_ranges(columns, parts, spec)
    _check_mask(columns, spec, shape)
    _check_duration(columns, spec, shape)


def _leading_shape(columns: Columns) -> tuple[int, int]:
    reward = columns["reward"]
    _check_dense("reward", reward, torch.float32)
    if reward.ndim == 1:
        raise ExperienceError(
            f"learn: the rollout is flat ([{len(reward)}] instead of [T, N]), and advantages need to know which step "
            "follows which. Pass what get() returns without flatten=True."
        )
    if reward.ndim != 2:
        raise ExperienceError(f"learn: reward has shape {tuple(reward.shape)}, expected [T, N]: steps, environments.")
    if reward.numel() == 0:
        raise ExperienceError(f"learn: the rollout holds no step (its reward has shape {list(reward.shape)}).")
    return int(reward.shape[0]), int(reward.shape[1])


def _check_type(key: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise unless `value` is a dense tensor of this shape and type."""
    _check_dense(key, value, dtype)
    if value.shape != shape:
        raise ExperienceError(
            f"learn: {key} has shape {list(value.shape)}, expected {list(shape)} (steps, environments, and then what "
            "the spaces of this policy say). Was the rollout collected in another environment?"
        )
    if value.dtype is not dtype:
        name = str(dtype).removeprefix("torch.")
        raise ExperienceError(f"learn: {key} is {_kind(value)}, expected {name}. Convert it: .to(torch.{name}).")


def _check_dense(key: str, value: Any, dtype: torch.dtype) -> None:
    """Raise for nested, sparse and meta tensors, some of which have no shape."""
    if not isinstance(value, Tensor):
        raise ExperienceError(f"learn: {key} is a {type(value).__name__}. Every column must be a torch.Tensor.")
    if value.is_nested or value.is_meta or value.layout is not torch.strided:
        kind = f"a nested tensor of {_kind(value)}" if value.is_nested else _kind(value)
        name = str(dtype).removeprefix("torch.")
        raise ExperienceError(f"learn: {key} is {kind}, expected a dense tensor of {name} whose numbers are there.")


def _kind(value: Tensor) -> str:
    parts = [str(value.dtype), str(value.layout), str(value.device)]
    return " ".join(part.removeprefix("torch.") for part in parts)


def _observation_parts(observation: Any, spec: RolloutSpec) -> list[tuple[str, Any, ArraySpec]]:
    """Name, value and spec of each part of an observation; a plain observation has one part."""
    if isinstance(spec.observation, ArraySpec):
        if isinstance(observation, Mapping):
            raise ExperienceError(
                f"learn: observation has parts ({', '.join(map(str, observation))}), and this policy sees one array."
            )
        return [("observation", observation, spec.observation)]
    names = set(spec.observation)
    if not isinstance(observation, Mapping) or set(observation) != names:
        got = ", ".join(map(str, observation)) if isinstance(observation, Mapping) else "one array"
        raise ExperienceError(f"learn: observation holds {got}, and this policy sees {', '.join(sorted(names))}.")
    return [(f"observation/{name}", observation[name], part) for name, part in spec.observation.items()]


def _check_ranges(columns: Columns, parts: list[tuple[str, Any, ArraySpec]], spec: RolloutSpec) -> None:
    for key, value, _ in parts:
        bounds = spec.bounds.get(key)
        if bounds is not None:
            _check_range(key, _array(value), *bounds)
    if spec.choices is None:
        return
    action = _array(columns["action"])
    # Fast check: as unsigned integers, negative numbers are huge.
    if action.dtype != np.int64 or int(action.view(np.uint64).max()) >= min(spec.choices):
        high = np.array(spec.choices).reshape(spec.action.shape) - 1
        _check_range("action", action, np.zeros_like(high), high)


def _check_mask(columns: Columns, spec: RolloutSpec, shape: tuple[int, int]) -> None:
    if "action_mask" not in columns:
        if spec.needs_mask:
            raise ExperienceError(
                "learn: the environment masks actions, and the rollout has no action_mask. Keep the column, or add one "
                "that is True wherever the action was allowed."
            )
        return
    if not spec.mask_size or spec.choices is None:
        raise ExperienceError("learn: the rollout has an action_mask, and actions of this policy cannot be masked.")
    _check_type("action_mask", columns["action_mask"], (*shape, spec.mask_size), torch.bool)
    mask = _array(columns["action_mask"])
    if sum(spec.choices) != spec.mask_size:
        return
    action = _array(columns["action"]).reshape(*shape, -1)
    starts = np.cumsum([0, *spec.choices[:-1]])
    possible = possible_actions(mask, spec.choices)
    allowed = np.take_along_axis(mask, action + starts, axis=-1).all(-1)
    ignored = ~_array(columns["valid"]) if "valid" in columns else np.zeros(shape, np.bool_)
    for right, what in ((possible, "allows no action"), (allowed, "forbids the action that was taken")):
        if at := _find_first(~(right | ignored)):
            raise ExperienceError(
                f"learn: action_mask {what} at step {at[0]} of environment {at[1]}. Fix the code that recorded it."
            )


def possible_actions(mask: NDArray[np.bool_], choices: tuple[int, ...] | None) -> NDArray[np.bool_]:
    """Where the masks `[..., k]` allow at least one value for each choice of an action."""
    if choices is None or sum(choices) != mask.shape[-1]:  # binary actions, which may all be off
        return np.ones(mask.shape[:-1], np.bool_)
    each: NDArray[np.bool_] = np.logical_or.reduceat(mask, np.cumsum([0, *choices[:-1]]), axis=-1)
    return np.asarray(each.all(-1))


def _check_duration(columns: Columns, spec: RolloutSpec, shape: tuple[int, int]) -> None:
    if (spec.chunk > 1) != ("duration" in columns):
        raise ExperienceError(
            f"learn: the policy decides on {spec.chunk} action{'s' if spec.chunk > 1 else ''} at a time, and the "
            f"rollout {'has' if 'duration' in columns else 'has no'} duration. Was it collected with another policy?"
        )
    if "duration" in columns:
        duration = columns["duration"]
        _check_type("duration", duration, shape, torch.int32)
        _check_range("duration", _array(duration), np.array(0), np.array(spec.chunk))


def _check_finite(key: str, tensor: Tensor) -> None:
    if tensor.is_cpu:
        array = tensor.numpy()
        # Fast check: a finite sum of squares has finite terms. One that overflows is checked exactly below.
        finite = math.isfinite(np.vdot(array, array))
    else:
        finite = bool(torch.isfinite(tensor).all())
    if not finite and (at := _find_first(~np.isfinite(_array(tensor)))):
        raise NonFiniteError(
            f"learn: {key} is not finite ({_array(tensor)[at]}) at step {at[0]} of environment {at[1]}; nothing was "
            "learned. Check what the environment (or the saved rollout) returns."
        )


def _check_range(key: str, array: NDArray[Any], low: NDArray[Any], high: NDArray[Any]) -> None:
    if array.min() >= low.max() and array.max() <= high.min():
        return
    if at := _find_first((array < low) | (array > high)):
        lowest, highest = (np.broadcast_to(bound, array.shape[2:])[at[2:]] for bound in (low, high))
        raise ExperienceError(
            f"learn: {key} is {array[at]} at step {at[0]} of environment {at[1]}, and must lie between {lowest} and "
            f"{highest} for this policy. Was the rollout collected in another environment?"
        )


def _find_first(wrong: NDArray[np.bool_]) -> tuple[int, ...]:
    """The index of the first True; empty if there is none."""
    return next((tuple(int(i) for i in at) for at in np.argwhere(wrong)), ())


def _array(tensor: Tensor) -> NDArray[Any]:
    return tensor.numpy() if tensor.is_cpu else tensor.cpu().numpy()


@cache
def _torch_type(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
