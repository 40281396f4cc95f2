"""Environments that fail on purpose, importable by a collector process."""

import os
import signal
import threading
from pathlib import Path

import gymnasium
import numpy as np

LET_GO = threading.Event()
"""Ends the waiting of a `Stuck` environment in this process."""


GO = threading.Event()
"""Lets a `RaisingWhenTold` environment in this process go on."""


class Room(gymnasium.Env):
    """Pays 1 for action 1; an episode has ten steps. At step `at` of its life something happens.

    Not to the first one that is made in a process, though: that is the one on which `make_env` tries out a step.
    """

    made = 0

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, at: int = -1) -> None:
        Room.made += 1
        self._at, self._life, self._step = at if Room.made > 1 else -1, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return self._see(), {}

    def step(self, action):
        self._life += 1
        self._step += 1
        if self._life == self._at:
            self.happen()
        return self._see(), float(action == 1), self._step == 10, False, {}

    def _see(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def happen(self) -> None:
        """Nothing happens here."""


class Raising(Room):
    def happen(self):
        raise RuntimeError("the floor gave way")


class RaisingWhenTold(Room):
    def happen(self):
        GO.wait(60)
        raise RuntimeError("the floor gave way")


class Killed(Room):
    def happen(self):
        os.kill(os.getpid(), signal.SIGKILL)


class KilledOnce(Room):
    """The first process to get there dies; `mark` remembers that it did."""

    def __init__(self, at: int, mark: str) -> None:
        super().__init__(at)
        self._mark = Path(mark)

    def happen(self):
        if not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Stuck(Room):
    def happen(self):
        LET_GO.wait(60)
