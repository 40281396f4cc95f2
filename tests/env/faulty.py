"""An environment that breaks its contract."""

from typing import Literal

import gymnasium
import numpy as np
from gymnasium import spaces


class Faulty(gymnasium.Env):
    """Works until step `at` of an episode, then breaks the Gymnasium contract as named by `fault`."""

    def __init__(
        self,
        fault: Literal["none", "nan_observation", "nan_reward", "shape", "raise", "exit"] = "raise",
        at: int = 3,
        length: int = 10,
    ):
        self.observation_space = spaces.Box(-1.0, float(length), (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._fault, self._at, self._length, self._t = fault, at, length, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._t = 0
        return self._observe(), {}

    def step(self, action):
        self._t += 1
        observation, reward = self._observe(), 1.0
        if self._t == self._at:
            if self._fault == "raise":
                raise RuntimeError("the simulator fell over")
            if self._fault == "exit":
                raise SystemExit(3)
            if self._fault == "shape":
                observation = np.zeros(3, np.float32)
            elif self._fault == "nan_observation":
                observation = np.full(2, np.nan, np.float32)
            elif self._fault == "nan_reward":
                reward = float("nan")
        return observation, reward, self._t >= self._length, False, {}

    def _observe(self):
        return np.full(2, self._t, np.float32)
