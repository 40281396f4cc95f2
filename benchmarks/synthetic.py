"""Image environments that cost next to nothing, so that a CNN policy is what is measured.

Frames come from a small bank drawn once; a step is an index, a comparison and a dictionary. The reward depends on the
frame and the action, so there is something to learn and the gradients do not vanish.
"""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

__all__ = ["Frame36", "Stack84", "make"]

_FRAMES = 32
_ACTIONS = 6
_EPISODE_STEPS = 250


class _FrameBank(gymnasium.Env):
    shape: tuple[int, ...]

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, self.shape, np.uint8)
        self.action_space = spaces.Discrete(_ACTIONS)
        self._bank = np.random.default_rng(0).integers(0, 256, (_FRAMES, *self.shape), np.uint8)
        self._frame = self._age = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._frame, self._age = int(self.np_random.integers(_FRAMES)), 0
        return self._bank[self._frame], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = 1.0 if action == self._frame % _ACTIONS else 0.0
        self._frame, self._age = (self._frame * 5 + 1) % _FRAMES, self._age + 1
        return self._bank[self._frame], reward, self._age == _EPISODE_STEPS, False, {}


class Stack84(_FrameBank):
    """Four stacked 84x84 frames, channels first: what an Atari preprocessing hands over."""

    shape = (4, 84, 84)


class Frame36(_FrameBank):
    """One small colour frame, channels last: what a renderer hands over."""

    shape = (36, 36, 3)


def make(env_id: str) -> gymnasium.Env:
    """One environment by Gymnasium id or by `module:Class`, without Gymnasium's per-step checker."""
    if ":" in env_id:
        module, _, name = env_id.partition(":")
        return getattr(importlib.import_module(module), name)()
    return gymnasium.make(env_id, disable_env_checker=True)
