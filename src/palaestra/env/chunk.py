"""Action chunks: one decision brings k actions, and the environment executes them one after the other.

A chunk ends early with its episode; `info["actions_executed"]` says how many actions got through, because only those
count in the chunk's log-probability. The reward of a decision is the sum over its actions. Wraps a single environment,
before it is vectorised, so that a neighbour's ending never cuts a chunk short.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from palaestra.errors import ConfigError

__all__ = ["ActionChunk"]


class ActionChunk(gymnasium.Wrapper[Any, NDArray[Any], Any, Any]):
    """Turns `Box` actions of shape (d,) into chunks of shape (k, d)."""

    EXECUTED: ClassVar[str] = "actions_executed"

    def __init__(self, env: gymnasium.Env[Any, Any], chunk: int) -> None:
        super().__init__(env)
        space = env.action_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise ConfigError(
                "env.action_chunk", chunk, f"chunks are of Box actions of shape (d,), this environment has {space}",
                "Leave env.action_chunk out",
            )  # fmt: skip
        self._chunk = chunk
        low, high = (np.broadcast_to(bound, (chunk, *space.shape)) for bound in (space.low, space.high))
        self.action_space = spaces.Box(low, high, dtype=space.dtype.type)

    def step(self, action: NDArray[Any]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute the chunk up to the end of the episode."""
        total, executed = 0.0, 0
        for one in action:
            executed += 1
            observation, reward, terminated, truncated, info = self.env.step(one)
            total += float(reward)
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, {**info, self.EXECUTED: executed}
