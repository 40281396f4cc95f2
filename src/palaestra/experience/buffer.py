"""`RolloutBuffer`: preallocated `[T, N, ...]` arrays for one rollout, filled row by row.

Arrays and tensors share memory; nothing is allocated per step. `get` returns a TensorDict view of the buffer, which is
valid until the buffer is reset and filled again: clone it to keep it. Row `T` of observations and masks is the start of
the next rollout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palaestra.errors import ExperienceError
from palaestra.experience.columns import ArraySpec, Columns, ObservationSpec, map_column
from palaestra.processes.memory import check_fits_in_memory

if TYPE_CHECKING:
    from tensordict import TensorDict

    from palaestra.experience.rollout import Rollout

_RECORDED = ("action", "log_prob", "value", "next_value", "reward", "terminated", "truncated")
"""Columns with an array in every buffer."""

Memory: TypeAlias = Callable[[tuple[int, ...], Any], NDArray[Any]]
"""Allocates a zeroed array of a shape and type: `numpy.zeros`, or in shared memory."""


class RolloutBuffer:
    """Storage for `num_steps` steps of `num_envs` environments."""

    def __init__(
        self,
        num_steps: int,
        num_envs: int,
        observation: ObservationSpec,
        action: ArraySpec,
        *,
        mask_size: int = 0,
        chunk: int = 1,
        memory: Memory = np.zeros,
    ) -> None:
        """`chunk`: actions per decision. Above 1, `chunk_log_prob` and `duration` (executed actions) are recorded."""
        T, N = num_steps, num_envs
        step = {"num_envs": N, "observation": observation, "action": action, "mask_size": mask_size, "chunk": chunk}
        if memory is np.zeros:
            needed = self.bytes_needed(T, **step)
            remedy = "Make it shorter, or use fewer environments"
            check_fits_in_memory("num_steps", T, {f"a rollout of {T:,} steps x {N} environments": needed}, remedy)
        self.num_steps, self.num_envs = T, N
        self.made_for: dict[str, Any] = step
        """Arguments that describe one step, to compare buffers."""
        self.observation = map_column(observation, lambda part: memory((T + 1, N, *part.shape), part.dtype))
        self.action: NDArray[Any] = memory((T, N, *action.shape), action.dtype)
        self.log_prob = memory((T, N), np.float32)
        self.value = memory((T, N), np.float32)
        self.next_value = memory((T, N), np.float32)
        self.reward = memory((T, N), np.float32)
        self.terminated = memory((T, N), np.bool_)
        self.truncated = memory((T, N), np.bool_)
        self.valid = memory((T, N), np.bool_)
        self.action_mask = memory((T + 1, N, mask_size), np.bool_) if mask_size else None
        self.chunk_log_prob = memory((T, N, chunk), np.float32) if chunk > 1 else None
        self.duration = memory((T, N), np.int32) if chunk > 1 else None
        self.policy_version = memory((T,), np.int64)
        self.policy_fingerprint = memory((T,), np.int64)
        if memory is np.zeros:  # shared memory may hold unread steps of another process
            self.valid[:] = True
            if self.action_mask is not None:
                self.action_mask[:] = True
        self.chunk = chunk
        self.reward_scale = 1.0
        self.first_stream = 0
        self.first_env_step = 0
        self.position = 0
        self.is_fresh = False
        """Whether the present weights of the learner collected it, so that no step can be stale."""

    @classmethod
    def bytes_needed(cls, num_steps: int, *args: Any, **kwargs: Any) -> int:
        """Size of such a buffer in bytes, without allocating it."""
        sizes: list[int] = []

        def count_bytes(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
            sizes.append(math.prod(shape) * np.dtype(dtype).itemsize)
            return np.empty(0, dtype)

        cls(num_steps, *args, **kwargs, memory=count_bytes)
        return sum(sizes)

    def add(self, transition: Mapping[str, Any] | TensorDict) -> None:
        """Append one step `[N, ...]`, or several `[t, N, ...]`, by key; only `reward` is required."""
        if self.is_full():
            raise ExperienceError(
                f"RolloutBuffer.add: all {self.num_steps} steps are filled. Call get() and reset() before adding more."
            )
        given, steps = read_steps(transition, "RolloutBuffer.add")
        if self.position + steps > self.num_steps:
            raise ExperienceError(
                f"RolloutBuffer.add: {steps} steps do not fit into the {self.num_steps - self.position} left of "
                f"{self.num_steps}. Add fewer, or make the buffer larger."
            )
        rows = slice(self.position, self.position + steps)
        self._clear(rows)
        for key, value in given.items():
            if key == "observation" and isinstance(self.observation, dict):
                names = {str(name) for name in value.keys()} if hasattr(value, "keys") else None
                if names != set(self.observation):
                    raise ExperienceError(
                        f"RolloutBuffer.add: observation holds {'one array' if names is None else sorted(names)}, "
                        f"expected the parts {sorted(self.observation)}."
                    )
                for name, column in self.observation.items():
                    _write(column, rows, value[name], f"observation/{name}")
            elif key in ("policy_version", "policy_fingerprint"):
                getattr(self, key)[rows] = _per_step(key, value, steps)
            elif key in ("reward_scale", "stream", "env_step"):
                continue
            else:
                column = getattr(self, key, None)
                if not isinstance(column, np.ndarray):
                    raise ExperienceError(f"RolloutBuffer.add: there is no column {key!r}.")
                _write(column, rows, value, key)
        self.position += steps

    def append(self, other: RolloutBuffer) -> None:
        """Append the filled steps of another buffer for the same environment and policy."""
        if other.made_for != self.made_for or self.position + other.position > self.num_steps:
            raise ExperienceError(
                f"RolloutBuffer.append: {other.position} steps of {other.made_for} do not fit into the "
                f"{self.num_steps - self.position} left of {self.num_steps} steps of {self.made_for}."
            )
        rows, t = slice(self.position, self.position + other.position), other.position
        for mine, theirs in zip(self._arrays(), other._arrays(), strict=True):
            mine[rows] = theirs[:t]
        self.position += t

    def read_environments(self, which: slice) -> list[NDArray[Any]]:
        """Copies of the columns of some environments, for `write_environments` of a buffer with more of them."""
        return [np.ascontiguousarray(array[:, which] if array.ndim > 1 else array) for array in self._arrays()]

    def write_environments(self, which: slice, arrays: list[NDArray[Any]]) -> None:
        """Write the columns of some environments."""
        for mine, array in zip(self._arrays(), arrays, strict=True):
            if mine.ndim > 1:
                mine[:, which] = array
            else:  # the same for all environments
                mine[:] = array

    def _arrays(self) -> list[NDArray[Any]]:
        """Every array, in a fixed order."""
        nested = list(self.observation.values()) if isinstance(self.observation, dict) else []
        return nested + [value for value in vars(self).values() if isinstance(value, np.ndarray)]

    def _clear(self, rows: slice) -> None:
        """Reset rows to defaults, so that columns missing in `add` hold no old data."""
        for array in self._arrays():
            array[rows] = 0
        self.valid[rows] = True
        if self.action_mask is not None:
            self.action_mask[rows] = True
        if self.duration is not None:
            self.duration[rows] = self.chunk

    def reset(self) -> None:
        """Start again at the first step, keeping the memory."""
        self.position, self.is_fresh = 0, False
        self.valid[:] = True

    def is_full(self) -> bool:
        """Whether every step has been written."""
        return self.position >= self.num_steps

    def columns(self) -> Columns:
        """The filled steps as plain tensors that share this buffer's memory."""
        t, n = self.position, self.num_envs
        tensor, arrays = torch.from_numpy, vars(self)
        columns: Columns = {"observation": map_column(self.observation, lambda part: tensor(part[:t]))}
        for name in _RECORDED:
            columns[name] = tensor(arrays[name][:t])
        # Expanded views, which cost no memory.
        columns["policy_version"] = tensor(self.policy_version[:t]).unsqueeze(1).expand(t, n)
        columns["policy_fingerprint"] = tensor(self.policy_fingerprint[:t]).unsqueeze(1).expand(t, n)
        columns["reward_scale"] = torch.tensor(self.reward_scale, dtype=torch.float32).expand(t, n)
        columns["stream"] = (self.first_stream + torch.arange(n)).expand(t, n)
        columns["env_step"] = (self.first_env_step + torch.arange(t)).unsqueeze(1).expand(t, n)
        if not self.valid[:t].all():
            columns["valid"] = tensor(self.valid[:t])
        if self.action_mask is not None:
            columns["action_mask"] = tensor(self.action_mask[:t])
        if self.duration is not None:
            columns["duration"] = tensor(self.duration[:t])
        return columns

    def get(self, flatten: bool = False) -> Rollout | TensorDict:
        """The filled steps as a `Rollout` `[T, N]` that shares this buffer's memory; `flatten` gives `[T * N]`."""
        from palaestra.experience.rollout import Rollout  # importing tensordict takes a second

        rollout = Rollout.from_columns(self.columns())
        return rollout.reshape(-1) if flatten else rollout


def read_steps(transition: Any, place: str) -> tuple[dict[str, Any], int]:
    """A transition by key, and its number of steps."""
    given = {str(key): transition[key] for key in transition.keys()}
    if "reward" not in given:
        raise ExperienceError(f"{place}: reward is missing; it determines the number of steps.")
    shape = _array(given["reward"]).shape
    return given, shape[0] if len(shape) == 2 else 1


def _per_step(key: str, value: Any, steps: int) -> NDArray[Any]:
    """One number per step: all environments act with the same weights."""
    numbers = _array(value)
    if numbers.dtype.kind not in "iu" or numbers.size % steps or not numbers.size:
        raise ExperienceError(
            f"RolloutBuffer.add: {key} is {numbers.dtype} of shape {numbers.shape}, expected one whole number for each "
            f"of {steps} steps."
        )
    numbers = numbers.reshape(steps, -1)
    if (numbers != numbers[:, :1]).any():
        raise ExperienceError(f"RolloutBuffer.add: the environments of one step must act on one {key}.")
    return numbers[:, 0]


def _array(value: Any) -> NDArray[Any]:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)


def _write(column: NDArray[Any], rows: slice, value: Any, key: str) -> None:
    array = _array(value)
    target = column[rows]
    if array.shape != target.shape and not (len(target) == 1 and array.shape == target.shape[1:]):
        raise ExperienceError(
            f"RolloutBuffer.add: {key} has shape {array.shape}, expected {target.shape[1:]} for each of the "
            f"{len(target)} steps."
        )
    is_flag = column.dtype == np.bool_ and array.dtype.kind in "iu"
    if not (is_flag or np.can_cast(array.dtype, column.dtype, "same_kind")):
        raise ExperienceError(
            f"RolloutBuffer.add: {key} is {array.dtype}, which cannot be stored as {column.dtype} without loss. "
            "Convert it."
        )
    target[:] = array
