"""Which spaces we train on, and how an environment's values become rows of plain arrays.

Owns the storage rules: a `Box` of uint8 stays uint8 (an image), every other `Box` and every `MultiBinary` becomes
float32, `Discrete` and `MultiDiscrete` become int64, and nested `Dict` spaces become one level of keys joined by "/".
Refuses `Tuple` and everything else with a `ConfigError` that says what to do instead. Actions are always the
environment's own values: a `Discrete(3, start=5)` is acted on with 5, 6 or 7. Driven by every environment of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from palaestra.env.vector import Observation, StepRow
from palaestra.errors import ConfigError

__all__ = [
    "ActionLayout",
    "ObservationLayout",
    "allocate_row",
    "copy_observation",
    "empty_observation",
    "flat_observation_space",
    "random_actions",
    "same_observation",
    "write_observation",
]

_OBSERVATIONS = "Box, Discrete, MultiDiscrete, MultiBinary, or a Dict of those"
_ACTIONS = "Discrete, MultiDiscrete, MultiBinary or a float Box"


@dataclass(frozen=True, slots=True)
class _Leaf:
    name: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    space: gymnasium.Space[Any]

    def pick(self, value: Any) -> Any:
        for key in self.path:
            value = value[key]
        return value

    def describe(self, got: object) -> str:
        where = f"observation[{self.name!r}]" if self.name else "the observation"
        return f"{where} has shape {got}, the observation space says {self.shape}"


class ObservationLayout:
    """How one environment's observation is laid out in arrays: an array, or one array per leaf of a `Dict`."""

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        self._leaves = tuple(_leaves_of(space, ()))
        self.is_dict = isinstance(space, spaces.Dict)
        names = [leaf.name for leaf in self._leaves]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ConfigError(
                "env.observation_space", space, f"two entries flatten to the key {doubled[0]!r}", "Rename one of them"
            )
        if not names:
            raise ConfigError("env.observation_space", space, "it is empty", "Give the environment an observation")
        self.space: gymnasium.Space[Any] = (
            spaces.Dict({leaf.name: leaf.space for leaf in self._leaves}) if self.is_dict else self._leaves[0].space
        )
        """What the rows hold, described as a space of one environment."""

    @property
    def plain_shape(self) -> tuple[int, ...] | None:
        """Shape of one observation when it is a single array, so that a hot loop may write it by itself."""
        leaf = self._leaves[0]
        return None if self.is_dict or not isinstance(leaf.space, spaces.Box) else leaf.shape

    def empty(self, leading: tuple[int, ...]) -> Observation:
        """Zeroed storage of shape `leading + one observation`."""
        arrays = {leaf.name: np.zeros(leading + leaf.shape, leaf.dtype) for leaf in self._leaves}
        return arrays if self.is_dict else arrays[""]

    def write(self, out: Observation, index: int, value: Any) -> None:
        """Write one environment's observation at `out[index]`; ValueError when its shape is not the space's."""
        for leaf in self._leaves:
            target = out[leaf.name] if isinstance(out, dict) else out
            found = np.asarray(leaf.pick(value))
            # Numpy would broadcast a wrong shape into the row without a word.
            if found.shape != leaf.shape:
                raise ValueError(leaf.describe(found.shape))
            target[index] = found

    def write_batch(self, out: Observation, value: Any) -> None:
        """Write a whole batch `[N, ...]`; ValueError when a shape is not the space's."""
        for leaf in self._leaves:
            target = out[leaf.name] if isinstance(out, dict) else out
            found = np.asarray(leaf.pick(value))
            if found.shape != target.shape:
                raise ValueError(leaf.describe(f"{found.shape} for {len(target)} environments"))
            target[...] = found

    def single(self, value: Any) -> Observation:
        """A copy of one environment's observation in stored form, without a leading axis."""
        out = self.empty((1,))
        self.write(out, 0, value)
        return copy_observation(out, 0)

    def arrays(self, observation: Observation) -> dict[str, NDArray[Any]]:
        """The arrays of an observation under stable names, for snapshots."""
        if isinstance(observation, dict):
            return {f"observation/{name}": array for name, array in observation.items()}
        return {"observation": observation}

    def from_arrays(self, arrays: dict[str, NDArray[Any]]) -> Observation:
        """The opposite of `arrays`; KeyError when one is missing."""
        if self.is_dict:
            return {leaf.name: arrays[f"observation/{leaf.name}"] for leaf in self._leaves}
        return arrays["observation"]


class ActionLayout:
    """How a batch of actions `[N, ...]` is stored and handed to single environments."""

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        self.space = space
        self.mask_size = 0
        """Length of an action mask for this space, were the environment to give one."""
        self.dtype: np.dtype[Any]
        self.shape: tuple[int, ...]
        if isinstance(space, spaces.Discrete):
            self.dtype, self.shape, self.mask_size = np.dtype(np.int64), (), int(space.n)
        elif isinstance(space, spaces.MultiDiscrete):
            self.dtype, self.shape = np.dtype(np.int64), tuple(space.nvec.shape)
            self.mask_size = int(space.nvec.sum())
        elif isinstance(space, spaces.MultiBinary):
            self.dtype, self.shape = np.dtype(np.int8), tuple(space.shape)
        elif isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
            self.dtype, self.shape = np.dtype(np.float32), tuple(space.shape)
        else:
            remedy = f"Supported action spaces are {_ACTIONS}; wrap the environment so that it offers one"
            raise ConfigError("env.action_space", space, "no policy of ours can act in this space", remedy)
        self.native_dtype = np.dtype(self.dtype if space.dtype is None else space.dtype)

    def empty(self, num_envs: int) -> NDArray[Any]:
        """Zeroed storage for a batch of actions."""
        return np.zeros((num_envs, *self.shape), self.dtype)

    def splitter(self) -> Callable[[NDArray[Any]], Sequence[Any]]:
        """A function that copies a batch and gives one action per environment, as the environment likes it."""
        if isinstance(self.space, spaces.Discrete):
            # numpy's own integers: `Discrete.contains`, which environments call, is slower on Python's.
            return list
        dtype = self.native_dtype
        # astype copies: the collector reuses its action buffer while a replay still needs these.
        return lambda action: list(action.astype(dtype))

    def batch(self, action: NDArray[Any]) -> NDArray[Any]:
        """A copy of a batch in the dtype the environment declared."""
        return action.astype(self.native_dtype)

    def read_mask(self, mask: Any) -> NDArray[np.bool_]:
        """An environment's `info["action_mask"]` as one flat array; ValueError when its length is wrong."""
        parts = mask if isinstance(mask, tuple | list) else (mask,)
        flat = np.concatenate([np.ravel(np.asarray(part)) for part in parts]).astype(np.bool_)
        if flat.shape != (self.mask_size,):
            raise ValueError(f"info['action_mask'] has {flat.size} entries, {self.space} has {self.mask_size} choices")
        return flat


def flat_observation_space(space: gymnasium.Space[Any]) -> gymnasium.Space[Any]:
    """The space as we store it: nested `Dict`s one level deep, floats as float32."""
    return ObservationLayout(space).space


def empty_observation(space: gymnasium.Space[Any], leading: tuple[int, ...]) -> Observation:
    """Zeroed storage for observations of `space`, e.g. `leading = (T, N)`."""
    return ObservationLayout(space).empty(leading)


def write_observation(out: Observation, index: int | EllipsisType, value: Observation) -> None:
    """Copy a stored observation (as `Ended.observation`) into `out[index]`, or a whole batch with `...`."""
    if isinstance(out, dict):
        if not isinstance(value, dict):
            raise TypeError(f"a dict of arrays is needed here, got {type(value).__name__}")
        for name, target in out.items():
            target[index] = value[name]
    else:
        out[index] = value


def copy_observation(observation: Observation, index: int | None = None) -> Observation:
    """A copy of a batch, or of one row of it."""
    at = ... if index is None else index
    if isinstance(observation, dict):
        return {name: np.array(array[at]) for name, array in observation.items()}
    return np.array(observation[at])


def same_observation(one: Observation, other: Observation) -> bool:
    """Whether two observations are the same bits (a NaN equals itself, 0.0 is not -0.0)."""
    if isinstance(one, dict) or isinstance(other, dict):
        if not (isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys()):
            return False
        return all(_same_bits(one[name], other[name]) for name in one)
    return _same_bits(one, other)


def _same_bits(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def allocate_row(observation_space: gymnasium.Space[Any], num_envs: int, mask_size: int = 0) -> StepRow:
    """A row of zeros for `num_envs` environments, for callers that keep no rollout buffer."""
    return StepRow(
        observation=empty_observation(observation_space, (num_envs,)),
        reward=np.zeros(num_envs, np.float32),
        terminated=np.zeros(num_envs, np.bool_),
        truncated=np.zeros(num_envs, np.bool_),
        valid=np.ones(num_envs, np.bool_),
        action_mask=np.ones((num_envs, mask_size), np.bool_) if mask_size else None,
    )


def random_actions(
    space: gymnasium.Space[Any],
    num_envs: int,
    rng: np.random.Generator,
    mask: NDArray[np.bool_] | None = None,
) -> NDArray[Any]:
    """A batch of allowed random actions, in the environment's own values."""
    layout = ActionLayout(space)
    action = layout.empty(num_envs)
    allowed = np.ones((num_envs, layout.mask_size), np.bool_) if mask is None else mask
    if isinstance(space, spaces.Discrete):
        for i in range(num_envs):
            action[i] = int(space.start) + rng.choice(np.flatnonzero(allowed[i]))
    elif isinstance(space, spaces.MultiDiscrete):
        flat, start = action.reshape(num_envs, -1), np.ravel(space.start)
        edges = np.concatenate([[0], np.cumsum(np.ravel(space.nvec))])
        for i in range(num_envs):
            for k in range(flat.shape[1]):
                flat[i, k] = start[k] + rng.choice(np.flatnonzero(allowed[i, edges[k] : edges[k + 1]]))
    elif isinstance(space, spaces.MultiBinary):
        action[...] = rng.integers(0, 2, action.shape)
    elif isinstance(space, spaces.Box):
        low = np.where(np.isfinite(space.low), space.low, -1.0)
        high = np.where(np.isfinite(space.high), space.high, np.maximum(low, 0.0) + 1.0)
        action[...] = rng.uniform(np.minimum(low, high), high, action.shape)
    return action


def _leaves_of(space: gymnasium.Space[Any], path: tuple[str, ...]) -> Iterator[_Leaf]:
    name = "/".join(path)
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            yield from _leaves_of(inner, (*path, key))
    elif isinstance(space, spaces.Box):
        stored = _stored_box(space)
        yield _Leaf(name, path, tuple(space.shape), np.dtype(stored.dtype), stored)
    elif isinstance(space, spaces.Discrete):
        yield _Leaf(name, path, (), np.dtype(np.int64), space)
    elif isinstance(space, spaces.MultiDiscrete):
        yield _Leaf(name, path, tuple(space.shape), np.dtype(np.int64), space)
    elif isinstance(space, spaces.MultiBinary):
        yield _Leaf(name, path, tuple(space.shape), np.dtype(np.float32), space)
    else:
        place = f"env.observation_space[{name!r}]" if name else "env.observation_space"
        remedy = "Use a Dict with named entries instead" if isinstance(space, spaces.Tuple) else "Wrap the environment"
        reason = f"{type(space).__name__} is not supported; supported are {_OBSERVATIONS}"
        raise ConfigError(place, space, reason, remedy)


def _stored_box(space: spaces.Box) -> spaces.Box:
    if space.dtype in (np.dtype(np.uint8), np.dtype(np.float32)):
        return space
    with np.errstate(over="ignore"):  # a float64 bound beyond float32 is no bound: infinity says the same
        low, high = space.low.astype(np.float32), space.high.astype(np.float32)
    return spaces.Box(low, high, space.shape, np.float32)
