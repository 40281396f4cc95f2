"""Supported spaces, and how observations and actions of environments are stored in arrays.

A `Box` of uint8 stays uint8 (an image); every other `Box` and every `MultiBinary` becomes float32; `Discrete` and
`MultiDiscrete` become int64; nested `Dict` spaces become one level of keys joined by "/". Other spaces are refused with
a `ConfigError`. Actions are always the values of the environment: a `Discrete(3, start=5)` takes 5, 6 or 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
from gymnasium import spaces

from palaestra.env.vector import Array, Flags, Observation, Space, StepRow
from palaestra.errors import ConfigError

_OBSERVATIONS = "Box, Discrete, MultiDiscrete, MultiBinary, or a Dict of those"
_ACTIONS = "Discrete, MultiDiscrete, MultiBinary or a float Box"


@dataclass(frozen=True, slots=True)
class _Leaf:
    name: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    space: Space
    keys: tuple[tuple[str, ...], ...]
    """All keys of each `Dict` on the path."""

    def select(self, value: Any) -> Any:
        """The entry of an observation; `ValueError` if a key on the path is missing."""
        for depth, key in enumerate(self.path):
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                raise self._key_error(value, depth) from None
        return value

    def _key_error(self, value: Any, depth: int) -> ValueError:
        where = f"observation{''.join(f'[{key!r}]' for key in self.path[:depth])}" if depth else "the observation"
        expected = ", ".join(map(repr, self.keys[depth]))
        if not isinstance(value, Mapping):
            return ValueError(f"{where} has type {type(value).__name__}, expected a dict with the keys {expected}")
        missing = ", ".join(repr(key) for key in self.keys[depth] if key not in value)
        unknown = ", ".join(repr(key) for key in value if key not in self.keys[depth])
        also = f" and has {unknown}, which is unknown" if unknown else ""
        return ValueError(f"{where} lacks {missing}{also}; the expected keys are {expected}")

    def shape_error(self, shape: object) -> ValueError:
        where = f"observation[{self.name!r}]" if self.name else "the observation"
        return ValueError(f"{where} has shape {shape}, the observation space says {self.shape}")


class ObservationLayout:
    """Storage of observations: one array, or one array per leaf of a `Dict`."""

    def __init__(self, space: Space) -> None:
        self._leaves = tuple(_iterate_leaves(space, ()))
        self.is_dict = isinstance(space, spaces.Dict)
        names = [leaf.name for leaf in self._leaves]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ConfigError(
                "env.observation_space", space, f"two entries flatten to the key {doubled[0]!r}", "Rename one of them"
            )
        if not names:
            raise ConfigError("env.observation_space", space, "it is empty", "Give the environment an observation")
        self.space: Space = (
            spaces.Dict({leaf.name: leaf.space for leaf in self._leaves}) if self.is_dict else self._leaves[0].space
        )
        """The space of one stored observation: nested `Dict`s flattened, floats as float32."""

    @property
    def plain_shape(self) -> tuple[int, ...] | None:
        """Shape of one observation if it is a single array, so that a hot loop may write it directly."""
        leaf = self._leaves[0]
        return None if self.is_dict or not isinstance(leaf.space, spaces.Box) else leaf.shape

    def empty(self, leading: tuple[int, ...]) -> Observation:
        """Zeroed storage of shape `leading + one observation`."""
        arrays = {leaf.name: np.zeros(leading + leaf.shape, leaf.dtype) for leaf in self._leaves}
        return arrays if self.is_dict else arrays[""]

    def write(self, out: Observation, index: int, value: Any) -> None:
        """Write the observation of one environment to `out[index]`; `ValueError` for a wrong shape."""
        for leaf in self._leaves:
            target = out[leaf.name] if isinstance(out, dict) else out
            array = np.asarray(leaf.select(value))
            # NumPy would broadcast a wrong shape silently.
            if array.shape != leaf.shape:
                raise leaf.shape_error(array.shape)
            target[index] = array

    def write_batch(self, out: Observation, value: Any) -> None:
        """Write a batch `[N, ...]`; `ValueError` for a wrong shape."""
        for leaf in self._leaves:
            target = out[leaf.name] if isinstance(out, dict) else out
            array = np.asarray(leaf.select(value))
            if array.shape != target.shape:
                raise leaf.shape_error(f"{array.shape} for {len(target)} environments")
            target[...] = array

    def batch_size(self, value: Any) -> int | None:
        """Number of observations in a batch; None for a single observation."""
        leaf = self._leaves[0]
        array = np.asarray(leaf.select(value))
        return len(array) if array.ndim == len(leaf.shape) + 1 else None

    def find_non_finite(self, value: Any) -> tuple[str, Any] | None:
        """The place, such as `['speed'][3]`, and value of the first entry that is not finite as float32, if any."""
        for leaf in self._leaves:
            array = np.asarray(leaf.select(value))
            if array.dtype.kind not in "fOUS":  # None, large integers and the text "nan" are converted as well
                continue
            with np.errstate(over="ignore"):
                is_finite = np.isfinite(array.astype(np.float32))
            if not is_finite.all():
                index = np.argwhere(~is_finite)[0].tolist()
                keys = "".join(f"[{key!r}]" for key in leaf.path)
                return f"{keys}{index or ''}", array.item(*index)
        return None

    def single(self, value: Any) -> Observation:
        """A copy of one observation in stored form, without a leading axis."""
        out = self.empty((1,))
        self.write(out, 0, value)
        return copy_observation(out, 0)

    def arrays(self, observation: Observation) -> dict[str, Array]:
        """The arrays of an observation by name, for snapshots."""
        if isinstance(observation, dict):
            return {f"observation/{name}": array for name, array in observation.items()}
        return {"observation": observation}

    def from_arrays(self, arrays: dict[str, Array]) -> Observation:
        """The inverse of `arrays`; `KeyError` if one is missing."""
        if self.is_dict:
            return {leaf.name: arrays[f"observation/{leaf.name}"] for leaf in self._leaves}
        return arrays["observation"]


class ActionLayout:
    """Storage of a batch of actions `[N, ...]`, and its conversion for single environments."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.mask_size = 0
        """Length of an action mask for this space."""
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
            remedy = f"Supported action spaces are {_ACTIONS}; wrap the environment"
            raise ConfigError("env.action_space", space, "no policy supports this space", remedy)
        self.native_dtype = np.dtype(self.dtype if space.dtype is None else space.dtype)

    def empty(self, num_envs: int) -> Array:
        """Zeroed storage for a batch of actions."""
        return np.zeros((num_envs, *self.shape), self.dtype)

    def splitter(self) -> Callable[[Array], Sequence[Any]]:
        """A function that copies a batch and returns one action per environment, in the type it expects."""
        if isinstance(self.space, spaces.Discrete):
            # NumPy integers: `Discrete.contains`, which environments call, is slower for Python integers.
            return list
        dtype = self.native_dtype
        # astype copies: the collector reuses its action buffer, and a replay needs the old values.
        return lambda action: list(action.astype(dtype))

    def batch(self, action: Array) -> Array:
        """A copy of a batch in the dtype of the action space."""
        return action.astype(self.native_dtype)

    def clip(self, action: Array) -> Array:
        """A batch with continuous actions clipped to the bounds of the space; other actions stay as they are."""
        if not isinstance(self.space, spaces.Box):
            return action
        clipped: Array = np.clip(action, self.space.low, self.space.high)
        return clipped

    def read_mask(self, mask: Any) -> Flags:
        """An `info["action_mask"]` as one flat array; `ValueError` for a wrong length."""
        parts = mask if isinstance(mask, tuple | list) else (mask,)
        flat = np.concatenate([np.ravel(np.asarray(part)) for part in parts]).astype(np.bool_)
        if flat.shape != (self.mask_size,):
            raise ValueError(f"info['action_mask'] has {flat.size} entries, {self.space} has {self.mask_size} choices")
        return flat


def flatten_observation(value: Any) -> Any:
    """An observation with its nested dicts flattened, as in the stored space; other observations as they are."""
    if not isinstance(value, Mapping):
        return value
    flat: dict[Any, Any] = {}
    for key, part in value.items():
        inner = flatten_observation(part)
        flat |= {f"{key}/{name}": entry for name, entry in inner.items()} if isinstance(inner, dict) else {key: inner}
    return flat


def write_observation(out: Observation, index: int | EllipsisType, value: Observation) -> None:
    """Copy a stored observation (as `EpisodeEnd.observation`) to `out[index]`, or a whole batch with `...`."""
    if isinstance(out, dict):
        if not isinstance(value, dict):
            raise TypeError(f"expected a dict of arrays, got {type(value).__name__}")
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


def _same_bits(one: Array, other: Array) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def allocate_row(observation_space: Space, num_envs: int, mask_size: int = 0) -> StepRow:
    """A row of zeros for `num_envs` environments."""
    return StepRow(
        observation=ObservationLayout(observation_space).empty((num_envs,)),
        reward=np.zeros(num_envs, np.float32),
        terminated=np.zeros(num_envs, np.bool_),
        truncated=np.zeros(num_envs, np.bool_),
        valid=np.ones(num_envs, np.bool_),
        action_mask=np.ones((num_envs, mask_size), np.bool_) if mask_size else None,
    )


def random_actions(space: Space, num_envs: int, rng: np.random.Generator, mask: Flags | None = None) -> Array:
    """A batch of random actions that the mask allows."""
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


def _iterate_leaves(space: Space, path: tuple[str, ...], keys: tuple[tuple[str, ...], ...] = ()) -> Iterator[_Leaf]:
    name = "/".join(path)
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            yield from _iterate_leaves(inner, (*path, key), (*keys, tuple(space.spaces)))
    elif isinstance(space, spaces.Box):
        stored = _storage_box(space)
        yield _Leaf(name, path, tuple(space.shape), np.dtype(stored.dtype), stored, keys)
    elif isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        dtype = np.float32 if isinstance(space, spaces.MultiBinary) else np.int64
        yield _Leaf(name, path, tuple(space.shape or ()), np.dtype(dtype), space, keys)
    else:
        place = f"env.observation_space[{name!r}]" if name else "env.observation_space"
        remedy = "Use a Dict with named entries instead" if isinstance(space, spaces.Tuple) else "Wrap the environment"
        reason = f"{type(space).__name__} is not supported; supported are {_OBSERVATIONS}"
        raise ConfigError(place, space, reason, remedy)


def _storage_box(space: spaces.Box) -> spaces.Box:
    if space.dtype in (np.dtype(np.uint8), np.dtype(np.float32)):
        return space
    with np.errstate(over="ignore"):  # a float64 bound beyond float32 becomes infinity
        low, high = space.low.astype(np.float32), space.high.astype(np.float32)
    return spaces.Box(low, high, space.shape, np.float32)
