"""Tiny deterministic environments whose every number can be worked out by hand.

For tests, examples and first steps; registered nowhere and used by address, e.g. `palaestra.env.toy:Countdown`.
Each keeps to one idea. Nothing here is meant to be hard, only to be exactly predictable.
"""

from __future__ import annotations

from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

__all__ = [
    "Bandit",
    "Countdown",
    "Faulty",
    "Gate",
    "MaskedChoice",
    "MixedSenses",
    "Pixels",
    "TargetReach",
]

_Step = tuple[Any, float, bool, bool, dict[str, Any]]


class Countdown(gymnasium.Env[NDArray[np.float32], Any]):
    """Episodes of fixed length that pay 1, 2, 3, ...; the observation is how many steps are left."""

    def __init__(self, length: int = 5, ending: Literal["terminated", "truncated"] = "terminated") -> None:
        self.observation_space = spaces.Box(0.0, float(length), (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._length, self._ending, self._t = length, ending, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Back to `length` steps left."""
        super().reset(seed=seed)
        self._t = 0
        return self._left(), {}

    def step(self, action: int) -> _Step:
        """One step closer to the end, whatever the action."""
        self._t += 1
        over = self._t >= self._length
        ended, cut = over and self._ending == "terminated", over and self._ending == "truncated"
        return self._left(), float(self._t), ended, cut, {}

    def _left(self) -> NDArray[np.float32]:
        return np.array([self._length - self._t], np.float32)


class Bandit(gymnasium.Env[NDArray[np.float32], Any]):
    """One step; the best arm pays 1 and the others nothing. `first_arm` moves the action numbers away from 0."""

    def __init__(self, arms: int = 3, best: int = 1, first_arm: int = 0) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(arms, start=first_arm)
        self._best = best + first_arm

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Nothing to see: the observation is always 0."""
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> _Step:
        """Pull one arm and go home."""
        return np.zeros(1, np.float32), float(action == self._best), True, False, {}


class TargetReach(gymnasium.Env[NDArray[np.float32], NDArray[np.float32]]):
    """A point on a line walks to a target drawn at reset; each step pays minus the distance left."""

    def __init__(self, length: int = 10) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._length, self._t = length, 0
        self._place, self._target = 0.0, 0.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start at 0 with the target somewhere in [-2, 2)."""
        super().reset(seed=seed)
        self._t, self._place = 0, 0.0
        self._target = float(self.np_random.uniform(-2.0, 2.0))
        return self._seen(), {}

    def step(self, action: NDArray[np.float32]) -> _Step:
        """Move by the action; the episode is truncated after `length` steps."""
        self._t += 1
        self._place += float(action[0])
        return self._seen(), -abs(self._target - self._place), False, self._t >= self._length, {}

    def _seen(self) -> NDArray[np.float32]:
        return np.array([self._place, self._target], np.float32)


class MaskedChoice(gymnasium.Env[Any, Any]):
    """Observation k in 0..n-1 allows only the actions up to k; the allowed action k pays 1, a forbidden one raises."""

    def __init__(self, n: int = 4, length: int = 6) -> None:
        self.observation_space = spaces.Discrete(n)
        self.action_space = spaces.Discrete(n)
        self._n, self._length, self._t = n, length, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Start at a k drawn from the seed."""
        super().reset(seed=seed)
        self._t, self._k = 0, int(self.np_random.integers(self._n))
        return self._k, self._allowed()

    def step(self, action: int) -> _Step:
        """Pay for the highest allowed action, then move to the next k."""
        if action > self._k:
            raise ValueError(f"action {action} is masked at observation {self._k}")
        reward = float(action == self._k)
        self._t, self._k = self._t + 1, (self._k + 1) % self._n
        return self._k, reward, self._t >= self._length, False, self._allowed()

    def _allowed(self) -> dict[str, Any]:
        return {"action_mask": (np.arange(self._n) <= self._k).astype(np.int8)}


class MixedSenses(gymnasium.Env[dict[str, Any], NDArray[np.int64]]):
    """A nested `Dict` observation (camera image, joint vector, room number) and two discrete actions at once."""

    def __init__(self, length: int = 4, size: int = 6) -> None:
        camera = spaces.Box(0, 255, (size, size, 3), np.uint8)
        joints = spaces.Box(-1.0, 1.0, (2,), np.float64)
        body = spaces.Dict({"joints": joints, "contact": spaces.MultiBinary(2)})
        self.observation_space = spaces.Dict({"camera": camera, "body": body, "room": spaces.Discrete(3)})
        self.action_space = spaces.MultiDiscrete([2, 3])
        self._length, self._size, self._t, self._room = length, size, 0, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start in a room drawn from the seed."""
        super().reset(seed=seed)
        self._t, self._room = 0, int(self.np_random.integers(3))
        return self._seen(), {}

    def step(self, action: NDArray[np.int64]) -> _Step:
        """Pays the sum of both actions; the second one changes the room."""
        self._t += 1
        self._room = (self._room + int(action[1])) % 3
        return self._seen(), float(action.sum()), False, self._t >= self._length, {}

    def _seen(self) -> dict[str, Any]:
        body = {"joints": np.array([0.1 * self._t, -0.1 * self._t]), "contact": np.array([1, self._t % 2], np.int8)}
        camera = np.full((self._size, self._size, 3), 10 * self._t + self._room, np.uint8)
        return {"camera": camera, "body": body, "room": self._room}


class Pixels(gymnasium.Env[NDArray[np.uint8], Any]):
    """An image with one bright column; naming the column pays 1."""

    def __init__(self, size: int = 8, length: int = 8) -> None:
        self.observation_space = spaces.Box(0, 255, (size, size, 1), np.uint8)
        self.action_space = spaces.Discrete(size)
        self._size, self._length, self._t, self._column = size, length, 0, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Light a column drawn from the seed."""
        super().reset(seed=seed)
        self._t = 0
        return self._next_image(), {}

    def step(self, action: int) -> _Step:
        """Pay for the right column and light another."""
        reward = float(action == self._column)
        self._t += 1
        return self._next_image(), reward, False, self._t >= self._length, {}

    def _next_image(self) -> NDArray[np.uint8]:
        self._column = int(self.np_random.integers(self._size))
        image = np.zeros((self._size, self._size, 1), np.uint8)
        image[:, self._column] = 255
        return image


class Faulty(gymnasium.Env[NDArray[np.float32], Any]):
    """Behaves until step `at` of an episode, then breaks its contract in the way `fault` names."""

    def __init__(
        self,
        fault: Literal["none", "nan_observation", "nan_reward", "shape", "raise", "exit"] = "raise",
        at: int = 3,
        length: int = 10,
    ) -> None:
        self.observation_space = spaces.Box(-1.0, float(length), (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._fault, self._at, self._length, self._t = fault, at, length, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """A fresh episode is always healthy."""
        super().reset(seed=seed)
        self._t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> _Step:
        """Count up; at step `at`, fail."""
        self._t += 1
        observation, reward = np.full(2, self._t, np.float32), 1.0
        if self._t == self._at:
            observation, reward = self._break(observation, reward)
        return observation, reward, self._t >= self._length, False, {}

    def _break(self, observation: NDArray[np.float32], reward: float) -> tuple[NDArray[np.float32], float]:
        if self._fault == "raise":
            raise RuntimeError("the simulator fell over")
        if self._fault == "exit":
            raise SystemExit(3)
        if self._fault == "shape":
            return np.zeros(3, np.float32), reward
        if self._fault == "nan_observation":
            return np.full(2, np.nan, np.float32), reward
        return observation, float("nan") if self._fault == "nan_reward" else reward


class Gate(gymnasium.Env[NDArray[np.float32], Any]):
    """Hold the right lever `difficulty` times in a row to open the gate; a curriculum turns both knobs.

    The observation is [steps still needed, task]. Task 0 wants lever 0 and task 1 wants lever 1. A wrong lever ends
    the episode unpaid; the opened gate pays 1. A change of difficulty or task counts from the next episode on.
    """

    def __init__(self, difficulty: int = 1, task: int = 0) -> None:
        self.observation_space = spaces.Box(0.0, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.difficulty, self.task = difficulty, task
        self._needed, self._lever = difficulty, task

    def set_difficulty(self, level: int) -> int:
        """How many steps the next episodes need; gives back the level."""
        self.difficulty = level
        return level

    def set_task(self, task: int) -> int:
        """Which lever the next episodes want; gives back the task."""
        self.task = task
        return task

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Close the gate."""
        super().reset(seed=seed)
        self._needed, self._lever = self.difficulty, self.task
        return self._seen(), {}

    def step(self, action: int) -> _Step:
        """Hold a lever for one step."""
        if action != self._lever:
            return self._seen(), 0.0, True, False, {}
        self._needed -= 1
        opened = self._needed <= 0
        return self._seen(), float(opened), opened, False, {}

    def _seen(self) -> NDArray[np.float32]:
        return np.array([self._needed, self._lever], np.float32)
