"""`compiled/CartPole-v1`: Gymnasium's CartPole-v1, stepped by a compiled kernel instead of Python.

`state`, `elapsed` and `stream` are plain arrays, so that the collector can run a whole rollout in one kernel.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from palaestra.env.vector import Array, EpisodeEnd, MethodForwarding, Snapshot, StepRow
from palaestra.errors import ConfigError, EnvironmentContractError
from palaestra.kernels.cartpole import MAX_ANGLE, MAX_POSITION, reset_cartpole, step_cartpole


class CompiledCartPole(MethodForwarding):
    """N CartPole environments."""

    mask_size = 0

    def __init__(self, num_envs: int = 8, max_episode_steps: int = 500, first_index: int = 0) -> None:
        """`first_index` as in `InProcessEnv`."""
        if num_envs < 1 or max_episode_steps < 1:
            raise ConfigError("env.kwargs", (num_envs, max_episode_steps), "each must be at least 1")
        self.num_envs = num_envs
        self.limit, self._first = max_episode_steps, first_index
        high = np.array([2 * MAX_POSITION, np.inf, 2 * MAX_ANGLE, np.inf], np.float32)
        self.observation_space = gymnasium.spaces.Box(-high, high, dtype=np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.state = np.zeros((num_envs, 4), np.float64)
        self.elapsed = np.zeros(num_envs, np.int64)
        self.stream = np.zeros(num_envs, np.uint64)
        self._ended = (np.zeros(num_envs, np.int64), np.zeros((num_envs, 4), np.float32), np.zeros(num_envs, np.int64))
        self._started = False

    def reset(self, seed: int, row: StepRow) -> None:
        """Start new episodes."""
        self._check_row(row)
        streams = np.random.SeedSequence(seed).generate_state(self._first + self.num_envs, np.uint64)
        self.stream[:] = streams[self._first :]
        for i in range(self.num_envs):
            reset_cartpole(i, self.state, self.elapsed, self.stream, row.observation)
        self._started = True

    def step(self, action: Array, row: StepRow) -> list[EpisodeEnd]:
        """Act in every environment."""
        if not self._started:
            raise EnvironmentContractError("step() was called before reset(). Call reset(seed, row) first.")
        if action.shape != (self.num_envs,):
            raise EnvironmentContractError(f"action has shape {action.shape}, expected ({self.num_envs},).")
        self._check_row(row)
        row.valid.fill(True)
        arrays = (row.observation, row.reward, row.terminated, row.truncated)
        count = step_cartpole(action, self.state, self.elapsed, self.stream, self.limit, arrays, self._ended)
        indices, last, lengths = self._ended
        # Every step pays 1, so an episode's return is its length.
        return [EpisodeEnd(int(indices[k]), last[k].copy(), float(lengths[k]), int(lengths[k])) for k in range(count)]

    def _check_row(self, row: StepRow) -> None:
        """Check the shapes, because the kernel writes without bounds checks."""
        count = (self.num_envs,)
        if not (
            row.observation.shape == (self.num_envs, 4)  # type: ignore[union-attr]
            and row.reward.shape == row.terminated.shape == row.truncated.shape == row.valid.shape == count
        ):
            raise EnvironmentContractError(f"the row does not have {self.num_envs} environments. Use allocate_row.")

    def snapshot(self) -> Snapshot:
        """Copies of the three state arrays."""
        return Snapshot({"state": self.state.copy(), "elapsed": self.elapsed.copy(), "stream": self.stream.copy()})

    def restore(self, snapshot: Snapshot, row: StepRow) -> bool:
        """Set the three state arrays."""
        if snapshot.arrays["state"].shape != self.state.shape:
            return False
        self.state[:] = snapshot.arrays["state"]
        self.elapsed[:] = snapshot.arrays["elapsed"]
        self.stream[:] = snapshot.arrays["stream"]
        row.observation[:] = self.state  # type: ignore[index]
        self._started = True
        return True

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Not supported: a kernel has no environment objects."""
        raise EnvironmentContractError(
            f"compiled/CartPole-v1 has no method {name!r}. Use CartPole-v1 for wrappers and curricula."
        )

    def has_method(self, name: str) -> bool:
        """Always false: a kernel has no environment objects."""
        return False

    def close(self) -> None:
        """Nothing to release."""
