"""Tiny deterministic environments for tests, examples and first steps; every number can be computed by hand.

They are not registered; use them by address, for example `palaestra.env.toy:Countdown`.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from palaestra.env.vector import Info

_Step: TypeAlias = tuple[Any, float, bool, bool, Info]


class _ToyEnv(gymnasium.Env[Any, Any]):
    """Counts the steps of an episode in `_t`. Subclasses define `_start_episode`, `_observe` and `step`."""

    _t = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        """Start an episode."""
        super().reset(seed=seed)
        self._t = 0
        self._start_episode()
        return self._observe(), self._info()

    def _start_episode(self) -> None:
        """Set the state of a new episode; random numbers come from `np_random`."""

    def _observe(self) -> Any:
        raise NotImplementedError

    def _info(self) -> Info:
        return {}


class Countdown(_ToyEnv):
    """Episodes of fixed length with rewards 1, 2, 3, ...; the observation is the number of remaining steps."""

    def __init__(self, length: int = 5, ending: Literal["terminated", "truncated"] = "terminated") -> None:
        self.observation_space = spaces.Box(0.0, float(length), (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._length, self._ending = length, ending

    def step(self, action: int) -> _Step:
        """Count one step; the action has no effect."""
        self._t += 1
        is_over = self._t >= self._length
        terminated, truncated = is_over and self._ending == "terminated", is_over and self._ending == "truncated"
        return self._observe(), float(self._t), terminated, truncated, {}

    def _observe(self) -> NDArray[np.float32]:
        return np.array([self._length - self._t], np.float32)


class Bandit(_ToyEnv):
    """One step per episode; the best arm pays 1, the others 0. `first_arm` is the lowest action number."""

    def __init__(self, arms: int = 3, best: int = 1, first_arm: int = 0) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(arms, start=first_arm)
        self._best = best + first_arm

    def step(self, action: int) -> _Step:
        """Pull one arm and end the episode."""
        return self._observe(), float(action == self._best), True, False, {}

    def _observe(self) -> NDArray[np.float32]:
        return np.zeros(1, np.float32)


class TargetReach(_ToyEnv):
    """A point on a line moves to a random target in [-2, 2); the reward is minus the remaining distance."""

    def __init__(self, length: int = 10) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._length = length
        self._position, self._target = 0.0, 0.0

    def _start_episode(self) -> None:
        self._position = 0.0
        self._target = float(self.np_random.uniform(-2.0, 2.0))

    def step(self, action: NDArray[np.float32]) -> _Step:
        """Move by the action; the episode is truncated after `length` steps."""
        self._t += 1
        self._position += float(action[0])
        return self._observe(), -abs(self._target - self._position), False, self._t >= self._length, {}

    def _observe(self) -> NDArray[np.float32]:
        return np.array([self._position, self._target], np.float32)


class MaskedChoice(_ToyEnv):
    """Observation k in 0..n-1 allows only the actions up to k; action k pays 1, a masked action raises."""

    def __init__(self, n: int = 4, length: int = 6) -> None:
        self.observation_space = spaces.Discrete(n)
        self.action_space = spaces.Discrete(n)
        self._n, self._length = n, length

    def _start_episode(self) -> None:
        self._k = int(self.np_random.integers(self._n))

    def step(self, action: int) -> _Step:
        """Pay for the highest allowed action, then go to the next k."""
        if action > self._k:
            raise ValueError(f"action {action} is masked at observation {self._k}")
        reward = float(action == self._k)
        self._t, self._k = self._t + 1, (self._k + 1) % self._n
        return self._k, reward, self._t >= self._length, False, self._info()

    def _observe(self) -> int:
        return self._k

    def _info(self) -> Info:
        return {"action_mask": (np.arange(self._n) <= self._k).astype(np.int8)}


class MixedSenses(_ToyEnv):
    """A nested `Dict` observation (camera image, joint vector, room number) and two discrete actions at once."""

    def __init__(self, length: int = 4, size: int = 6) -> None:
        camera = spaces.Box(0, 255, (size, size, 3), np.uint8)
        joints = spaces.Box(-1.0, 1.0, (2,), np.float64)
        body = spaces.Dict({"joints": joints, "contact": spaces.MultiBinary(2)})
        self.observation_space = spaces.Dict({"camera": camera, "body": body, "room": spaces.Discrete(3)})
        self.action_space = spaces.MultiDiscrete([2, 3])
        self._length, self._size, self._room = length, size, 0

    def _start_episode(self) -> None:
        self._room = int(self.np_random.integers(3))

    def step(self, action: NDArray[np.int64]) -> _Step:
        """Pay the sum of both actions; the second one changes the room."""
        self._t += 1
        self._room = (self._room + int(action[1])) % 3
        return self._observe(), float(action.sum()), False, self._t >= self._length, {}

    def _observe(self) -> dict[str, Any]:
        body = {"joints": np.array([0.1 * self._t, -0.1 * self._t]), "contact": np.array([1, self._t % 2], np.int8)}
        camera = np.full((self._size, self._size, 3), 10 * self._t + self._room, np.uint8)
        return {"camera": camera, "body": body, "room": self._room}


class Pixels(_ToyEnv):
    """An image with one bright column; choosing its number pays 1."""

    def __init__(self, size: int = 8, length: int = 8) -> None:
        self.observation_space = spaces.Box(0, 255, (size, size, 1), np.uint8)
        self.action_space = spaces.Discrete(size)
        self._size, self._length, self._column = size, length, 0

    def _start_episode(self) -> None:
        self._column = int(self.np_random.integers(self._size))

    def step(self, action: int) -> _Step:
        """Pay for the right column and light another."""
        reward = float(action == self._column)
        self._t += 1
        self._column = int(self.np_random.integers(self._size))
        return self._observe(), reward, False, self._t >= self._length, {}

    def _observe(self) -> NDArray[np.uint8]:
        image = np.zeros((self._size, self._size, 1), np.uint8)
        image[:, self._column] = 255
        return image


class Gate(_ToyEnv):
    """Hold the right lever `difficulty` times in a row to open the gate; made for curricula.

    The observation is [remaining steps, task]. Task 0 needs lever 0, task 1 needs lever 1. A wrong lever ends the
    episode without reward; opening the gate pays 1. New difficulties and tasks apply from the next episode on.
    """

    def __init__(self, difficulty: int = 1, task: int = 0) -> None:
        self.observation_space = spaces.Box(0.0, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.difficulty, self.task = difficulty, task
        self._remaining, self._lever = difficulty, task

    def set_difficulty(self, level: int) -> int:
        """Set the number of steps of the next episodes; returns the level."""
        self.difficulty = level
        return level

    def set_task(self, task: int) -> int:
        """Set the lever of the next episodes; returns the task."""
        self.task = task
        return task

    def _start_episode(self) -> None:
        self._remaining, self._lever = self.difficulty, self.task

    def step(self, action: int) -> _Step:
        """Hold a lever for one step."""
        if action != self._lever:
            return self._observe(), 0.0, True, False, {}
        self._remaining -= 1
        is_open = self._remaining <= 0
        return self._observe(), float(is_open), is_open, False, {}

    def _observe(self) -> NDArray[np.float32]:
        return np.array([self._remaining, self._lever], np.float32)
