"""`EnvPoolEnv`: N environments that EnvPool steps in C++, with the rows of any other `VectorEnv`.

EnvPool resets an environment in the step after the end of its episode, and ignores the action of that step. Here an
ended environment is reset at once instead, so there are no steps without an action: the row has the first observation
of the next episode, and the `EpisodeEnd` has the last one of the ended episode. The time limit is counted here, except
for Atari, because EnvPool reports a termination in the last step as a truncation.

EnvPool seeds environments only when a pool is made, so every `reset` makes a new pool. It checks no shapes: an array of
a wrong length would end the process, so each is checked here before it is sent. The state of the simulators cannot be
read, so there are no snapshots: a resumed run starts new episodes.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from gymnasium import spaces

from palaestra.env.envpool.catalogue import PoolSpec, find_spec
from palaestra.env.spaces import ActionLayout, ObservationLayout, copy_observation
from palaestra.env.vector import Array, EpisodeEnd, MethodForwarding, Observation, Snapshot, Space, StepRow
from palaestra.errors import ConfigError, EnvironmentContractError
from palaestra.kernels.compile import compile_kernel
from palaestra.processes.children import usable_cores

_MAX_SEED = 2**31 - 1


class EnvPoolEnv(MethodForwarding):
    """N environments of EnvPool as a `VectorEnv`."""

    mask_size = 0

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        *,
        kwargs: dict[str, Any] | None = None,
        max_episode_steps: int | None = None,
        num_threads: int | None = None,
        first_index: int = 0,
    ) -> None:
        """`num_threads`: None for one per core, or one if the steps are too short to divide them among threads.

        `first_index` as in `InProcessEnv`.
        """
        self._first = first_index
        self._spec = find_spec(env_id, kwargs or {}, max_episode_steps)
        self._layout = ObservationLayout(self._spec.observation_space)
        self._actions = ActionLayout(self._spec.action_space)
        self.num_envs = num_envs
        self.num_threads = min(num_envs, num_threads or choose_num_threads(self._spec))
        self.observation_space = self._layout.space
        self.action_space: Space = self._spec.action_space
        self._low, self._high = _action_range(self.action_space)
        self._action_shape = (num_envs, *self._actions.shape)
        self._count = (num_envs,)
        self._is_plain = self._layout.plain_shape is not None
        self._ids = np.arange(num_envs, dtype=np.int32)
        self._returns = np.zeros(num_envs, np.float64)
        self._lengths = np.zeros(num_envs, np.int64)
        self._ended = np.zeros(num_envs, np.int32)
        limit = self._spec.max_episode_steps
        self._limit = sys.maxsize if limit is None or self._spec.counts_own_steps else limit
        self._pool: Any = None
        self._closed = False

    def reset(self, seed: int, row: StepRow) -> None:
        """Start new episodes in a new pool. Each environment gets its own seed, derived from `seed`."""
        if self._closed:
            raise EnvironmentContractError("reset() was called after close(). Make a new environment.")
        self._check_row(row)
        self._pool = None  # its threads end before new ones start
        pool = self._spec.make_pool(self.num_envs, self.num_threads, _derive_seeds(seed, self._first, self.num_envs))
        self._connect(pool)
        self._returns[:] = 0.0
        self._lengths[:] = 0
        pool._reset(self._ids)
        state = pool._recv()
        self._check_state(state)
        self._pool = pool
        self._write_observation(row.observation, state)

    def _connect(self, pool: Any) -> None:
        """Look up where the pool keeps what is read in every step."""
        keys = [str(key) for key in pool._spec._state_keys]
        if [str(key) for key in pool._spec._action_keys] != ["env_id", "players.env_id", "action"]:
            reason = "its actions have several parts"
            raise ConfigError("env.id", self._spec.id, reason, "Leave env.backend out")
        self._send, self._recv = pool._send, pool._recv
        self._reward, self._done, self._trunc = (keys.index(name) for name in ("reward", "done", "trunc"))
        self._over = keys.index("info:terminated") if self._spec.counts_own_steps else None
        found = [keys.index(name) for name in ("info:is_success", "info:success") if name in keys]
        self._success = found[0] if found else None
        sources = [(_leaf_name(key), i) for i, key in enumerate(keys) if key.startswith("obs")]
        self._sources = dict(sources)
        self._plain_source = sources[0][1]
        # EnvPool reads the actions from this array while it steps.
        dtype = pool._spec._action_spec[-1][0]
        self._sent = np.zeros(self._action_shape, dtype)
        self._message = [self._ids, self._ids, self._sent]
        self._no_flags = np.zeros(self.num_envs, np.bool_)

    def step(self, action: Array, row: StepRow) -> list[EpisodeEnd]:
        """Act in every environment; environments whose episode ends are reset within the same step."""
        if self._pool is None:
            raise EnvironmentContractError("step() was called before reset(). Call reset(seed, row) first.")
        if action.shape != self._action_shape:
            raise EnvironmentContractError(
                f"action has shape {action.shape}, expected {self._action_shape} for {self.num_envs} environments "
                f"with {self.action_space}."
            )
        self._check_row(row)
        if self._low is not None and not _is_in_range(action, self._low, self._high):
            raise EnvironmentContractError(f"an action of {action.tolist()} is not in {self.action_space}.")
        self._sent[...] = action
        try:
            self._send(self._message)
            state = self._recv()
        except BaseException:
            self._pool = None  # interrupted between the two: the next answer would be that of this step
            raise
        if self._is_plain:
            row.observation[...] = state[self._plain_source]  # type: ignore[index]
        else:
            self._write_observation(row.observation, state)
        trunc = state[self._trunc]
        over = self._no_flags if self._over is None else state[self._over].astype(np.bool_)
        count = _advance_episodes(
            (state[self._reward], state[self._done], trunc, over),
            (row.reward, row.terminated, row.truncated, row.valid),
            (self._returns, self._lengths, self._ended),
            self._limit,
        )
        return self._end_episodes(count, state, row) if count else []

    def _end_episodes(self, count: int, state: list[Array], row: StepRow) -> list[EpisodeEnd]:
        """Collect the ended episodes, and start new ones."""
        ended = []
        indices = self._ended[:count].copy()
        for i in indices.tolist():
            last = copy_observation(row.observation, i)
            success = None if self._success is None else bool(state[self._success][i])
            ended.append(EpisodeEnd(i, last, float(self._returns[i]), int(self._lengths[i]), None, success))
        self._returns[indices] = 0.0
        self._lengths[indices] = 0
        try:
            self._pool._reset(indices)
            fresh = self._recv()
        except BaseException:
            self._pool = None
            raise
        self._write_observation(row.observation, fresh, indices)
        return ended

    def _write_observation(self, out: Observation, state: list[Array], rows: Any = ...) -> None:
        if isinstance(out, dict):
            for name, target in out.items():
                target[rows] = state[self._sources[name]].reshape(-1, *target.shape[1:])
        else:
            out[rows] = state[self._plain_source].reshape(-1, *out.shape[1:])

    def _check_row(self, row: StepRow) -> None:
        """Check the shapes, because the kernel writes without bounds checks."""
        count = self._count
        if not (row.reward.shape == row.terminated.shape == row.truncated.shape == row.valid.shape == count):
            raise EnvironmentContractError(f"the row does not have {self.num_envs} environments. Use allocate_row.")

    def _check_state(self, state: list[Array]) -> None:
        """Raise if EnvPool does not return one number per environment, in the order of the environments."""
        if not np.array_equal(state[0], self._ids) or state[self._reward].shape != self._count:
            raise EnvironmentContractError(f"EnvPool's {self._spec.id} does not return one row per environment.")

    def snapshot(self) -> Snapshot | None:
        """None: EnvPool cannot save the state of its simulators."""
        return None

    def restore(self, snapshot: Snapshot, row: StepRow) -> bool:
        """Start new episodes, and return False."""
        self.reset(0, row)
        return False

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Not supported: EnvPool has no environment objects."""
        raise EnvironmentContractError(
            f"EnvPool's {self._spec.id} has no method {name!r}. Leave env.backend out for wrappers and curricula."
        )

    def has_method(self, name: str) -> bool:
        """Always false: EnvPool has no environment objects."""
        return False

    def close(self) -> None:
        """End the threads of the pool."""
        self._closed = True
        self._pool = self._send = self._recv = None


def choose_num_threads(spec: PoolSpec) -> int:
    """One per core; one for environments whose step takes less time than waking a thread."""
    return 1 if spec.is_cheap else usable_cores()


def _derive_seeds(seed: int, first: int, num_envs: int) -> list[int]:
    """Seeds of the environments from number `first` on, all different, each the same for any number of environments."""
    last = first + num_envs
    drawn = np.random.SeedSequence(seed).generate_state(last + 64) & np.uint32(_MAX_SEED)
    # As dictionary keys, because two of many thousands may be equal.
    return list(dict.fromkeys(drawn.tolist()))[first:last]


def _action_range(space: Space) -> tuple[int | None, int]:
    """Smallest and largest action of a `Discrete` space; None for other spaces, whose actions need no check."""
    if isinstance(space, spaces.Discrete):
        return int(space.start), int(space.start + space.n) - 1
    return None, 0


def _leaf_name(key: str) -> str:
    """The name of an observation as in `ObservationLayout`: "obs:arm.joints" is "arm/joints", "obs" is ""."""
    return key.removeprefix("obs").lstrip(":").replace(":", "/").replace(".", "/")


@compile_kernel  # type: ignore[untyped-decorator, unused-ignore]
def _is_in_range(action: Any, low: Any, high: Any) -> Any:
    smallest = largest = action[0]
    for i in range(1, len(action)):
        smallest, largest = min(smallest, action[i]), max(largest, action[i])
    return smallest >= low and largest <= high


@compile_kernel  # type: ignore[untyped-decorator, unused-ignore]
def _advance_episodes(state: Any, row: Any, episodes: Any, limit: Any) -> Any:
    """Write reward and flags of every environment; returns the number of ended episodes, whose indices are written."""
    reward, done, trunc, over = state
    row_reward, terminated, truncated, valid = row
    returns, lengths, ended = episodes
    count = 0
    for i in range(len(reward)):
        row_reward[i] = reward[i]
        valid[i] = True
        returns[i] += reward[i]
        lengths[i] += 1
        terminated[i] = done[i] and (over[i] or not trunc[i])
        truncated[i] = trunc[i] or lengths[i] >= limit
        if terminated[i] or truncated[i]:
            ended[count] = i
            count += 1
    return count
