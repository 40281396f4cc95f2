"""Environments stepped one after the other in this process: the default, and the fastest way for cheap environments.

Handles autoreset, time limits and episode statistics itself: the outermost `TimeLimit`, `OrderEnforcing` and
`PassiveEnvChecker` wrappers of Gymnasium are removed, because doing their work here takes a quarter of the time. A
wrong observation shape and any exception of the environment become an `EnvironmentContractError` that names the
environment and the step. The collector checks that numbers are finite, for a whole rollout at a time.

A snapshot holds the state of the random generator before the reset of each running episode and the actions since;
restoring replays them and checks that the last observation has the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from palaestra.env.factory import ActionChunk, describe_exception, locate_user_code
from palaestra.env.spaces import ActionLayout, ObservationLayout, copy_observation, same_observation
from palaestra.env.vector import Array, EpisodeEnd, GymEnv, Info, MethodForwarding, Snapshot, Space, StepRow
from palaestra.errors import ConfigError, EnvironmentContractError

_MAX_REPLAY_STEPS = 65_536
"""Steps of an episode that are kept for a replay; a longer episode has no snapshot."""

_REPLAYABLE = ("PCG64", "PCG64DXSM")


class InProcessEnv(MethodForwarding):
    """N Gymnasium environments in this process, as a `VectorEnv`."""

    def __init__(
        self, make: Callable[[], GymEnv], num_envs: int, *, first_index: int = 0, mask_size: int | None = None
    ) -> None:
        """Make `num_envs` environments.

        `first_index` is the global number of the first one, so that the environments of a worker are seeded and named
        as in one process. A given `mask_size` saves the reset that detects action masks.
        """
        self.num_envs = num_envs
        self._wrapped = [make() for _ in range(num_envs)]
        unwrapped = [_unwrap(env) for env in self._wrapped]
        self._envs = [env for env, _ in unwrapped]
        self._limits = [limit for _, limit in unwrapped]
        self._layout = ObservationLayout(self._envs[0].observation_space)
        self._actions = ActionLayout(self._envs[0].action_space)
        _check_same_spaces(self._envs)
        self.observation_space = self._layout.space
        self.action_space: Space = self._envs[0].action_space
        self._first = first_index
        self._steps: list[Callable[[Any], Any]] = [env.step for env in self._envs]
        self._range = range(num_envs)
        self._split = self._actions.splitter()
        self._action_shape = (num_envs, *self._actions.shape)
        self._structured = len(self._action_shape) > 1
        plain = self._layout.plain_shape
        self._plain_size = plain[0] if plain is not None and len(plain) == 1 else 0
        self._seeds = [0] * num_envs
        # Looked up once: if an environment replaces its generator between seeds, the check of the replay fails.
        self._bit_generators: list[np.random.BitGenerator | None] = [None] * num_envs
        self._start_states: list[Mapping[str, Any] | None] = [None] * num_envs
        self._returns: list[float] = [0.0] * num_envs
        self._last_values: list[Any] = [None] * num_envs
        # One step counter for all: the length of an episode is the counter minus its value at the start.
        self._num_steps = 0
        self._start_steps = [0] * num_envs
        self._deadline = 0
        self._history: list[Sequence[Any]] = []
        self._history_from = 0
        self._running = False
        self._closed = False
        self.mask_size = self._probe_mask() if mask_size is None else mask_size

    @classmethod
    def from_envs(cls, envs: Sequence[GymEnv]) -> InProcessEnv:
        """Use existing environments, which must share one observation space and one action space."""
        remaining = iter(envs)
        return cls(lambda: next(remaining), len(envs))

    def unwrapped_env(self, index: int) -> tuple[GymEnv, int]:
        """An environment without Gymnasium's outermost wrappers, and its time limit."""
        return self._envs[index], self._limits[index]

    def reset(self, seed: int, row: StepRow) -> None:
        """Start new episodes. Each environment gets its own seed, derived from `seed`."""
        self._num_steps, self._history, self._history_from = 0, [], 0
        for i in self._range:
            self._seeds[i] = _derive_seed(seed, self._first + i)
            self._start_episode(i, row, seed=self._seeds[i])
        self._running = True
        self._update_deadline()

    def step(self, action: Array, row: StepRow) -> list[EpisodeEnd]:
        """Act in every environment; environments whose episode ends are reset within the same step."""
        if not self._running:
            raise EnvironmentContractError("step() was called before reset(). Call reset(seed, row) first.")
        # Reading .shape makes a tuple, which is slow here: for a batch of single numbers the length is enough.
        if len(action) != self.num_envs or (self._structured and action.shape != self._action_shape):
            raise EnvironmentContractError(
                f"action has shape {action.shape}, expected {self._action_shape} for {self.num_envs} environments "
                f"with {self.action_space}."
            )
        actions = self._split(action)
        self._history.append(actions)
        if len(self._history) > 2 * _MAX_REPLAY_STEPS:
            del self._history[:_MAX_REPLAY_STEPS]
            self._history_from += _MAX_REPLAY_STEPS
        self._num_steps += 1
        row.terminated.fill(False)
        row.truncated.fill(False)
        row.valid.fill(True)
        if self._plain_size and self.mask_size == 0:
            return self._step_plain(actions, row)
        return self._step_any(actions, row)

    def _step_plain(self, actions: Sequence[Any], row: StepRow) -> list[EpisodeEnd]:
        """The fast path for vector observations without masks; it runs at every step of every environment."""
        observation, rewards, size = row.observation, row.reward, self._plain_size
        returns, last = self._returns, self._last_values
        check_limits = self._num_steps >= self._deadline
        ended: list[EpisodeEnd] = []
        i = 0
        try:
            for i, step, action in zip(self._range, self._steps, actions, strict=True):
                value, reward, terminated, truncated, info = step(action)
                # Of all shapes with this length, only the right one fits into the row; NumPy refuses the others.
                if len(value) != size:
                    raise ValueError(f"the observation has shape {value.shape}, the observation space says ({size},)")
                observation[i] = last[i] = value  # type: ignore[index]
                rewards[i] = reward
                returns[i] += reward
                if (terminated or truncated or check_limits) and self._is_over(i, terminated, truncated, row):
                    ended.append(self._end_episode(i, value, row, info))
        except Exception as error:
            raise self._contract_error(i, error) from error
        if check_limits:
            self._update_deadline()
        return ended

    def _step_any(self, actions: Sequence[Any], row: StepRow) -> list[EpisodeEnd]:
        layout, check_limits = self._layout, self._num_steps >= self._deadline
        ended: list[EpisodeEnd] = []
        i = 0
        try:
            for i, step, action in zip(self._range, self._steps, actions, strict=True):
                value, reward, terminated, truncated, info = step(action)
                layout.write(row.observation, i, value)
                self._last_values[i] = value
                row.reward[i] = reward
                self._returns[i] += reward
                if self._is_over(i, terminated, truncated, row):
                    ended.append(self._end_episode(i, value, row, info))
                else:
                    self._write_mask(i, info, row)
        except Exception as error:
            raise self._contract_error(i, error) from error
        if check_limits:
            self._update_deadline()
        return ended

    def _is_over(self, i: int, terminated: bool, truncated: bool, row: StepRow) -> bool:
        timed_out = self._num_steps - self._start_steps[i] >= self._limits[i]
        if terminated:
            row.terminated[i] = True
        if truncated or timed_out:
            row.truncated[i] = True
        return bool(terminated or truncated or timed_out)

    def _end_episode(self, i: int, value: Any, row: StepRow, info: Info) -> EpisodeEnd:
        # Copy before reset(): some environments reuse their observation array.
        last = np.array(value, self.observation_space.dtype) if self._plain_size else self._layout.single(value)
        length = self._num_steps - self._start_steps[i]
        success = info.get("is_success")
        executed = info.get(ActionChunk.EXECUTED)
        success = None if success is None else bool(success)
        end = EpisodeEnd(i, last, float(self._returns[i]), length, executed, success)
        self._start_episode(i, row)
        return end

    def _start_episode(self, i: int, row: StepRow | None, *, seed: int | None = None) -> Info:
        """Start an episode, save the state of its random generator, and return the info of the reset."""
        bits = self._bit_generators[i]
        self._start_states[i] = bits.state if bits is not None else None
        self._start_steps[i], self._returns[i] = self._num_steps, 0.0
        try:
            value, info = self._envs[i].reset() if seed is None else self._envs[i].reset(seed=seed)
            self._last_values[i] = value
            if not isinstance(value, np.ndarray):
                self._plain_size = 0  # lists and numbers take the general path
            if row is not None:
                if self._plain_size and len(value) == self._plain_size:
                    row.observation[i] = value  # type: ignore[index]
                else:
                    self._layout.write(row.observation, i, value)
                self._write_mask(i, info, row)
        except Exception as error:
            raise self._contract_error(i, error, in_reset=True) from error
        if seed is not None:
            self._bit_generators[i] = _bit_generator(self._envs[i])
            self._start_states[i] = {"seed": seed} if self._bit_generators[i] is not None else None
        if len(self._history) > 4096:
            self._trim_history()
        return info

    def _trim_history(self) -> None:
        unused = min(self._start_steps) - self._history_from
        if unused > len(self._history) // 2:
            del self._history[:unused]
            self._history_from += unused

    def _update_deadline(self) -> None:
        """Compute the first step at which a running episode can reach its time limit; no check is needed before."""
        self._deadline = min(start + limit for start, limit in zip(self._start_steps, self._limits, strict=True))

    def _write_mask(self, i: int, info: Info, row: StepRow) -> None:
        if row.action_mask is not None:
            mask = info.get("action_mask")
            row.action_mask[i] = True if mask is None else self._actions.read_mask(mask)

    def _probe_mask(self) -> int:
        if self._actions.mask_size == 0:
            return 0
        try:
            _, info = self._envs[0].reset(seed=0)
        except Exception as error:
            raise self._contract_error(0, error, in_reset=True) from error
        return self._actions.mask_size if info.get("action_mask") is not None else 0

    def _contract_error(self, i: int, error: Exception, *, in_reset: bool = False) -> EnvironmentContractError:
        if isinstance(error, EnvironmentContractError):
            return error
        name = type(self._envs[i].unwrapped).__name__
        length = self._num_steps - self._start_steps[i]
        when = "in reset()" if in_reset else f"{length} {'step' if length == 1 else 'steps'} into its episode"
        # A ValueError without a line of the user is ours, about a wrong observation.
        what = (
            str(error) if isinstance(error, ValueError) and not locate_user_code(error) else describe_exception(error)
        )
        return EnvironmentContractError(f"environment {self._first + i} ({name}), {when}: {what}.")

    def snapshot(self) -> Snapshot | None:
        """Seeds, generator states and actions since; None if an environment does not use Gymnasium's generator."""
        if not self._running or any(start is None for start in self._start_states):
            return None
        if min(self._start_steps) < self._history_from:
            return None
        since = [
            [self._history[k - self._history_from][i] for k in range(self._start_steps[i], self._num_steps)]
            for i in self._range
        ]
        dtype = self._actions.native_dtype
        flat = [np.asarray(action, dtype) for actions in since for action in actions]
        observation = self._layout.empty((self.num_envs,))
        for i in self._range:
            self._layout.write(observation, i, self._last_values[i])
        arrays = {
            "actions": np.array(flat, dtype).reshape(-1, *self._actions.shape),
            "lengths": np.array([len(actions) for actions in since], np.int64),
            "returns": np.array(self._returns, np.float64),
            **self._layout.arrays(observation),
        }
        facts = {"kind": "replay", "seeds": list(self._seeds), "starts": [dict(s) for s in self._start_states if s]}
        return Snapshot(arrays, facts)

    def restore(self, snapshot: Snapshot, row: StepRow) -> bool:
        """Replay every running episode; False (and new episodes) if one does not end at the same observation."""
        try:
            same = self._replay(snapshot, row)
        except (EnvironmentContractError, KeyError, ValueError):
            same = False
        if not same:
            self._num_steps, self._history, self._history_from = 0, [], 0
            for i in self._range:
                self._start_episode(i, row)
        self._running = True
        self._update_deadline()
        return same

    def _replay(self, snapshot: Snapshot, row: StepRow) -> bool:
        facts, arrays = snapshot.facts, snapshot.arrays
        if facts.get("kind") != "replay" or len(facts["starts"]) != self.num_envs:
            return False
        wanted, lengths = self._layout.from_arrays(arrays), arrays["lengths"].tolist()
        replayed = np.split(arrays["actions"], np.cumsum(lengths)[:-1])
        self._num_steps = self._history_from = 0
        self._history = []
        infos: list[Info] = []
        for i in self._range:
            self._seeds[i] = int(facts["seeds"][i])
            # Seed first, for environments that draw a map or a level from the seed and keep it.
            info = self._start_episode(i, None, seed=self._seeds[i])
            if "seed" not in facts["starts"][i]:
                _set_rng_state(self._envs[i], facts["starts"][i])
                info = self._start_episode(i, None)
            infos.append(self._replay_one(i, replayed[i], info))
        self._rebuild_history(lengths, replayed)
        self._returns = arrays["returns"].tolist()
        for i in self._range:
            self._layout.write(row.observation, i, self._last_values[i])
            self._write_mask(i, infos[i], row)
        return same_observation(copy_observation(row.observation), wanted)

    def _replay_one(self, i: int, actions: Array, info: Info) -> Info:
        """Repeat the actions and return the last info, which holds the mask."""
        try:
            for action in self._split(actions):
                self._last_values[i], _, terminated, truncated, info = self._steps[i](action)
                if terminated or truncated:
                    raise EnvironmentContractError(f"environment {self._first + i} ended its episode during a replay.")
        except Exception as error:
            raise self._contract_error(i, error) from error
        return info

    def _rebuild_history(self, lengths: list[int], replayed: list[Array]) -> None:
        self._num_steps = max(lengths)
        self._start_steps = [self._num_steps - length for length in lengths]
        split = [self._split(actions) for actions in replayed]
        self._history = [
            [split[i][k - self._start_steps[i]] if k >= self._start_steps[i] else None for i in self._range]
            for k in range(self._num_steps)
        ]

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of each environment, or read an attribute that is not callable."""
        results = []
        for env in self._envs:
            try:
                attribute = env.get_wrapper_attr(name)
            except AttributeError as error:
                raise ConfigError("call", name, f"{env.unwrapped} has no such method", "Check the name") from error
            results.append(attribute(*args, **kwargs) if callable(attribute) else attribute)
        return results

    def has_method(self, name: str) -> bool:
        """Whether each environment or one of its wrappers has a method of this name."""
        return all(env.has_wrapper_attr(name) and callable(env.get_wrapper_attr(name)) for env in self._envs)

    def close(self) -> None:
        """Close every environment, once."""
        if self._closed:
            return
        self._closed, self._running = True, False
        for env in self._wrapped:
            env.close()


def _unwrap(env: GymEnv) -> tuple[GymEnv, int]:
    """Remove Gymnasium's outermost wrappers; return the environment and the time limit of the wrappers."""
    limit = sys.maxsize
    while True:
        # Exactly these types: a subclass may do more.
        if type(env) is TimeLimit:
            max_steps = getattr(env, "_max_episode_steps", None)
            if not isinstance(max_steps, int):
                return env, limit
            limit = min(limit, max_steps)
        elif type(env) is not OrderEnforcing and type(env) is not PassiveEnvChecker:
            return env, limit
        env = env.env


def _check_same_spaces(envs: Sequence[GymEnv]) -> None:
    first = envs[0]
    for i, env in enumerate(envs):
        for kind in ("observation_space", "action_space"):
            if getattr(env, kind) != getattr(first, kind):
                reason = f"environment 0 has {getattr(first, kind)}; all of them must share one space"
                raise ConfigError(f"env[{i}].{kind}", getattr(env, kind), reason, "Make them from one factory")


def _derive_seed(seed: int, index: int) -> int:
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0])


def _bit_generator(env: GymEnv) -> np.random.BitGenerator | None:
    generator = getattr(env.unwrapped, "np_random", None)
    if not isinstance(generator, np.random.Generator):
        return None
    bits = generator.bit_generator
    # Other generators have arrays in their state, which are not plain JSON.
    return bits if type(bits).__name__ in _REPLAYABLE else None


def _set_rng_state(env: GymEnv, state: Mapping[str, Any]) -> None:
    """Set the state in place, because parts of the environment may hold references to the generator."""
    bits = _bit_generator(env)
    if bits is None or type(bits).__name__ != state["bit_generator"]:
        raise ValueError(f"the environment's generator is not the {state['bit_generator']} of the snapshot")
    bits.state = dict(state)
