"""`Episode`, `TransitionArrays` and `ArrayLayout`: the arrays of a dataset in memory, and the check of their values.

An episode is checked before it is stored, and when it is read from a file that another program wrote: shapes, numbers
that are not finite, values that a type or a space cannot hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from palaestra.errors import DatasetError
from palaestra.experience.datasets.spaces import Array, Arrays, Leaf, Space, action_leaf, observation_leaves

SCALARS = {"rewards": np.float32, "terminations": np.bool_, "truncations": np.bool_}
"""Arrays with one number per step, by name."""
_TOLERANCE = 1e-5
"""How far a continuous action may lie outside its bounds, as a share of their distance."""
_DISCRETE_RULES = {
    "b": ("is neither 0 nor 1", "Give flags"),
    "i": ("is not an integer", "Check the spaces"),
    "u": ("is not an integer from 0 to 255", "Check the spaces"),
}
"""Reason and remedy by kind of type, for a value that the type cannot hold."""


class TransitionArrays(NamedTuple):
    """The steps of a dataset, episode after episode and in time order. Every array is `[n, ...]`."""

    observation: Arrays
    """One array, or for a `Dict` space one per leaf."""
    action: Array
    reward: NDArray[np.float32]
    next_observation: Arrays
    """The observation after the action, also at the end of an episode."""
    terminated: NDArray[np.bool_]
    """The task ended here: the future is worth nothing."""
    truncated: NDArray[np.bool_]
    """The episode was cut off here: the future is worth the value of `next_observation`."""


@dataclass(frozen=True)
class Episode:
    """One episode of T steps, T at least 1."""

    observations: Mapping[str, Array]
    """`[T + 1, ...]` per leaf; the name of a single array is empty."""
    actions: Array
    rewards: Array
    terminated: Array
    truncated: Array
    seed: int | None = None

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def total_reward(self) -> float:
        """Sum of the rewards."""
        return float(np.sum(self.rewards, dtype=np.float64))


class ArrayLayout:
    """The arrays of a dataset with these spaces, in the order of the index."""

    def __init__(self, observation_space: Space, action_space: Space) -> None:
        self.observations = observation_leaves(observation_space)
        self.action = action_leaf(action_space)
        self._action_limits = _action_limits(action_space)
        self.is_dict = isinstance(observation_space, spaces.Dict)
        number = spaces.Box(-np.inf, np.inf)
        self._scalars = [Leaf(name, number, (), np.dtype(dtype)) for name, dtype in SCALARS.items()]

    @property
    def step_bytes(self) -> int:
        """Bytes of one stored step."""
        return sum(leaf.row_bytes for leaf in self.observations) + self.action.row_bytes + 6

    def names(self) -> list[str]:
        """Paths of the arrays inside the group of an episode."""
        observations = [f"observations/{leaf.name}".rstrip("/") for leaf in self.observations]
        return [*observations, "actions", *SCALARS]

    def check(self, episode: Episode, place: str) -> list[Array]:
        """The arrays of an episode in the order of `names`; `DatasetError` about `place` for wrong or NaN values.

        Observations may lie outside the bounds of a `Box`, because those of many environments do.
        """
        T = len(episode)
        if T == 0:
            raise DatasetError(place, 0, "has no steps", "Leave it out")
        arrays = []
        for leaf in self.observations:
            name = f"observations[{leaf.name!r}]" if leaf.name else "observations"
            arrays.append(_convert(episode.observations.get(leaf.name), leaf, T + 1, f"{place}.{name}"))
        actions = _convert(episode.actions, self.action, T, f"{place}.actions")
        if self._action_limits is not None:
            low, high = self._action_limits
            reason, remedy = f"is outside {self.action.space}", "Clip it as the environment does, or check the space"
            _refuse((actions < low) | (actions > high), actions, f"{place}.actions", reason, remedy)
        arrays.append(actions)
        for leaf, values in zip(self._scalars, (episode.rewards, episode.terminated, episode.truncated), strict=True):
            arrays.append(_convert(values, leaf, T, f"{place}.{leaf.name}"))
        return arrays


def _convert(values: Any, leaf: Leaf, length: int, place: str) -> Array:
    """The values in the type of the leaf; `DatasetError` if one of them is not finite or would be changed."""
    if values is None:
        raise DatasetError(place, None, "is missing", "Record it")
    array = np.asarray(values)
    if array.shape != (length, *leaf.shape):
        reason = f"has shape {list(array.shape)}; the space and the length of the episode demand another"
        raise DatasetError(place, list(array.shape), reason, f"Give {[length, *leaf.shape]}")
    if array.dtype.kind not in "biuf":
        raise DatasetError(place, str(array.dtype), "is not an array of numbers", "Give numbers")
    if array.dtype.kind == "f":
        _refuse(~np.isfinite(array), array, place, "is NaN or infinite", "Remove the episode")
    with np.errstate(over="ignore", invalid="ignore"):
        converted = np.ascontiguousarray(array, leaf.dtype)
    if leaf.dtype.kind == "f":
        _refuse(~np.isfinite(converted), array, place, f"is too large for {leaf.dtype}", "Remove the episode")
    else:
        _refuse(converted != array, array, place, *_DISCRETE_RULES[leaf.dtype.kind])
    if isinstance(leaf.space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        low, high = _choices(leaf.space)
        _refuse((converted < low) | (converted >= high), array, place, f"is outside {leaf.space}", "Check the spaces")
        if leaf.dtype.kind == "f":
            _refuse(converted % 1 != 0, array, place, "is neither 0 nor 1", "Check the spaces")
    return converted


def read_flags(values: Array, place: str) -> NDArray[np.bool_]:
    """The values as booleans; `DatasetError` about `place` if one is neither 0 nor 1."""
    return _convert(values, Leaf(place, spaces.MultiBinary(1), (), np.dtype(np.bool_)), len(values), place)


def _choices(space: spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary) -> tuple[Any, Any]:
    """The lowest value of each choice, and the one after the highest."""
    if isinstance(space, spaces.MultiBinary):
        return 0, 2
    return space.start, space.start + (space.n if isinstance(space, spaces.Discrete) else space.nvec)


def _action_limits(space: Space) -> tuple[Array, Array] | None:
    """The bounds of continuous actions, widened by what rounding to float32 may add; None for choices."""
    if not isinstance(space, spaces.Box):
        return None
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    with np.errstate(invalid="ignore"):
        width = np.where(np.isfinite(high - low), high - low, 1.0)
        rounding = np.finfo(np.float32).eps
        return low - _TOLERANCE * width - rounding * abs(low), high + _TOLERANCE * width + rounding * abs(high)


def _refuse(is_wrong: Array, values: Array, place: str, reason: str, remedy: str) -> None:
    """Raise `DatasetError` with the first wrong value and its row."""
    if is_wrong.any():
        index = tuple(int(axis[0]) for axis in np.nonzero(is_wrong))
        raise DatasetError(f"{place} row {index[0]}", values[index].item(), reason, remedy)
