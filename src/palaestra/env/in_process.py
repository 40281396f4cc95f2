"""Environments stepped one after the other in this process: the default, and for cheap environments the fastest.

Owns autoreset, the time limit and the bookkeeping of episodes. Gymnasium's `TimeLimit`, `OrderEnforcing` and
`PassiveEnvChecker` are stepped past when they are the outermost layers: what they do is done here, for a quarter of
the price. A wrong observation shape and any exception of the environment become an `EnvironmentContractError` that
names the environment and the step; that numbers are finite is checked by the collector, a whole rollout at a time.

An environment's state is how it got there: a snapshot holds the random generator's state before each running
episode's reset and the actions since, and restoring replays them. It promises nothing it did not check: the replayed
observation must be the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
from numpy.typing import NDArray

from palaestra.env.chunk import ActionChunk
from palaestra.env.spaces import (
    ActionLayout,
    ObservationLayout,
    copy_observation,
    same_observation,
)
from palaestra.env.vector import Ended, MethodForwarding, Snapshot, StepRow
from palaestra.errors import ConfigError, EnvironmentContractError

__all__ = ["InProcessEnv"]

_FORGET_AFTER = 65_536
"""Steps of an episode that are remembered for a replay; an episode longer than that gives no snapshot."""

_REPLAYABLE = ("PCG64", "PCG64DXSM")


class InProcessEnv(MethodForwarding):
    """N Gymnasium environments in this process, as a `VectorEnv`."""

    def __init__(
        self,
        make: Callable[[], gymnasium.Env[Any, Any]],
        num_envs: int,
        *,
        first_index: int = 0,
        mask_size: int | None = None,
    ) -> None:
        """Make `num_envs` environments.

        `first_index` is the global number of the first one, so that a worker's share is seeded and named as if it
        were not shared out. `mask_size` saves the one reset that finds out whether there are action masks.
        """
        self.num_envs = num_envs
        self._made = [make() for _ in range(num_envs)]
        stripped = [_stripped(env) for env in self._made]
        self._envs = [env for env, _ in stripped]
        self._limits = [limit for _, limit in stripped]
        self._layout = ObservationLayout(self._envs[0].observation_space)
        self._actions = ActionLayout(self._envs[0].action_space)
        _refuse_mixture(self._envs)
        self.observation_space = self._layout.space
        self.action_space: gymnasium.Space[Any] = self._envs[0].action_space
        self._first = first_index
        self._steps: list[Callable[[Any], Any]] = [env.step for env in self._envs]
        self._range = range(num_envs)
        self._split = self._actions.splitter()
        self._action_shape = (num_envs, *self._actions.shape)
        self._structured = len(self._action_shape) > 1
        plain = self._layout.plain_shape
        self._plain_size = plain[0] if plain is not None and len(plain) == 1 else 0
        self._seeds = [0] * num_envs
        # Looked up once: an environment that swaps its generator between seeds fails the replay's check, not silently.
        self._bits: list[np.random.BitGenerator | None] = [None] * num_envs
        self._starts: list[Mapping[str, Any] | None] = [None] * num_envs
        self._returns: list[float] = [0.0] * num_envs
        self._last: list[Any] = [None] * num_envs
        # One clock for all: an episode's length is the clock minus when it started, and costs nothing per step.
        self._clock = 0
        self._started = [0] * num_envs
        self._deadline = 0
        self._history: list[Sequence[Any]] = []
        self._history_from = 0
        self._running = False
        self._closed = False
        self.mask_size = self._probe_mask() if mask_size is None else mask_size

    @classmethod
    def of(cls, envs: Sequence[gymnasium.Env[Any, Any]]) -> InProcessEnv:
        """The environments at hand, which must share one observation and one action space."""
        waiting = iter(envs)
        return cls(lambda: next(waiting), len(envs))

    def reset(self, seed: int, row: StepRow) -> None:
        """Start fresh episodes everywhere, each environment on its own stream drawn from `seed`."""
        self._clock, self._history, self._history_from = 0, [], 0
        for i in self._range:
            self._seeds[i] = _seed_of(seed, self._first + i)
            self._begin(i, row, seed=self._seeds[i])
        self._running = True
        self._plan_deadline()

    def step(self, action: NDArray[Any], row: StepRow) -> list[Ended]:
        """Act in every environment; those whose episode ends are reset within the same step."""
        if not self._running:
            raise EnvironmentContractError("step() was called before reset(). Call reset(seed, row) first.")
        # Asking for .shape makes a tuple, which is dear here: a batch of single numbers is told by its length.
        if len(action) != self.num_envs or (self._structured and action.shape != self._action_shape):
            raise EnvironmentContractError(
                f"action has shape {action.shape}, expected {self._action_shape} for {self.num_envs} environments "
                f"with {self.action_space}."
            )
        actions = self._split(action)
        self._history.append(actions)
        if len(self._history) > 2 * _FORGET_AFTER:
            del self._history[:_FORGET_AFTER]
            self._history_from += _FORGET_AFTER
        self._clock += 1
        row.terminated.fill(False)
        row.truncated.fill(False)
        row.valid.fill(True)
        if self._plain_size and self.mask_size == 0:
            return self._step_plain(actions, row)
        return self._step_any(actions, row)

    def _step_plain(self, actions: Sequence[Any], row: StepRow) -> list[Ended]:
        """One vector per observation and no masks: every line here is paid for at every step of every environment."""
        observation, rewards, size = row.observation, row.reward, self._plain_size
        returns, last = self._returns, self._last
        late = self._clock >= self._deadline
        ended: list[Ended] = []
        i = 0
        try:
            for i, step, action in zip(self._range, self._steps, actions, strict=True):
                value, reward, terminated, truncated, info = step(action)
                # Of all shapes with this length only the right one fits into the row; numpy refuses the others.
                if len(value) != size:
                    raise ValueError(f"the observation has shape {value.shape}, the observation space says ({size},)")
                observation[i] = last[i] = value  # type: ignore[index]
                rewards[i] = reward
                returns[i] += reward
                if (terminated or truncated or late) and self._is_over(i, terminated, truncated, row):
                    ended.append(self._turn_over(i, value, row, info))
        except Exception as error:
            raise self._fault(i, error) from error
        if late:
            self._plan_deadline()
        return ended

    def _step_any(self, actions: Sequence[Any], row: StepRow) -> list[Ended]:
        layout, late = self._layout, self._clock >= self._deadline
        ended: list[Ended] = []
        i = 0
        try:
            for i, step, action in zip(self._range, self._steps, actions, strict=True):
                value, reward, terminated, truncated, info = step(action)
                layout.write(row.observation, i, value)
                self._last[i] = value
                row.reward[i] = reward
                self._returns[i] += reward
                if self._is_over(i, terminated, truncated, row):
                    ended.append(self._turn_over(i, value, row, info))
                elif row.action_mask is not None:
                    self._write_mask(i, info, row)
        except Exception as error:
            raise self._fault(i, error) from error
        if late:
            self._plan_deadline()
        return ended

    def _is_over(self, i: int, terminated: bool, truncated: bool, row: StepRow) -> bool:
        timed_out = self._clock - self._started[i] >= self._limits[i]
        if terminated:
            row.terminated[i] = True
        if truncated or timed_out:
            row.truncated[i] = True
        return bool(terminated or truncated or timed_out)

    def _turn_over(self, i: int, value: Any, row: StepRow, info: dict[str, Any]) -> Ended:
        # The copy comes first: environments that reuse their observation array overwrite it in reset().
        last = np.array(value, self.observation_space.dtype) if self._plain_size else self._layout.single(value)
        length = self._clock - self._started[i]
        success = info.get("is_success")
        done = Ended(
            i, last, float(self._returns[i]), length, info.get(ActionChunk.EXECUTED),
            None if success is None else bool(success),
        )  # fmt: skip
        self._begin(i, row)
        return done

    def _begin(self, i: int, row: StepRow | None, *, seed: int | None = None) -> dict[str, Any]:
        """Start an episode, having noted where its randomness comes from; gives the reset's info."""
        bits = self._bits[i]
        self._starts[i] = bits.state if bits is not None else None
        self._started[i], self._returns[i] = self._clock, 0.0
        try:
            value, info = self._envs[i].reset() if seed is None else self._envs[i].reset(seed=seed)
            self._last[i] = value
            if not isinstance(value, np.ndarray):
                self._plain_size = 0  # lists and numbers are observations too, on the general path
            if row is not None:
                if self._plain_size and len(value) == self._plain_size:
                    row.observation[i] = value  # type: ignore[index]
                else:
                    self._layout.write(row.observation, i, value)
                if row.action_mask is not None:
                    self._write_mask(i, info, row)
        except Exception as error:
            raise self._fault(i, error, doing="reset") from error
        if seed is not None:
            self._bits[i] = _bit_generator(self._envs[i])
            self._starts[i] = {"seed": seed} if self._bits[i] is not None else None
        if len(self._history) > 4096:
            self._forget_finished()
        return info

    def _forget_finished(self) -> None:
        needless = min(self._started) - self._history_from
        if needless > len(self._history) // 2:
            del self._history[:needless]
            self._history_from += needless

    def _plan_deadline(self) -> None:
        """When the first of the running episodes can reach its time limit; before that nobody looks."""
        self._deadline = min(start + limit for start, limit in zip(self._started, self._limits, strict=True))

    def _write_mask(self, i: int, info: dict[str, Any], row: StepRow) -> None:
        if row.action_mask is None:
            return
        mask = info.get("action_mask")
        row.action_mask[i] = True if mask is None else self._actions.read_mask(mask)

    def _probe_mask(self) -> int:
        if self._actions.mask_size == 0:
            return 0
        try:
            _, info = self._envs[0].reset(seed=0)
        except Exception as error:
            raise self._fault(0, error, doing="reset") from error
        return self._actions.mask_size if info.get("action_mask") is not None else 0

    def _fault(self, i: int, error: Exception, *, doing: str = "step") -> EnvironmentContractError:
        if isinstance(error, EnvironmentContractError):
            return error
        name = type(self._envs[i].unwrapped).__name__
        when = "in reset()" if doing == "reset" else f"{self._clock - self._started[i]} steps into its episode"
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return EnvironmentContractError(f"environment {self._first + i} ({name}), {when}: {what}.")

    def snapshot(self) -> Snapshot | None:
        """Seeds, generator states and actions since; None where an environment's randomness is not Gymnasium's."""
        if not self._running or any(start is None for start in self._starts):
            return None
        if min(self._started) < self._history_from:
            return None
        since = [
            [self._history[k - self._history_from][i] for k in range(self._started[i], self._clock)]
            for i in self._range
        ]
        dtype = self._actions.native_dtype
        flat = [np.asarray(action, dtype) for actions in since for action in actions]
        observation = self._layout.empty((self.num_envs,))
        for i in self._range:
            self._layout.write(observation, i, self._last[i])
        arrays = {
            "actions": np.array(flat, dtype).reshape(-1, *self._actions.shape),
            "lengths": np.array([len(actions) for actions in since], np.int64),
            "returns": np.array(self._returns, np.float64),
            **self._layout.arrays(observation),
        }
        facts = {"kind": "replay", "seeds": list(self._seeds), "starts": [dict(s) for s in self._starts if s]}
        return Snapshot(arrays, facts)

    def restore(self, snapshot: Snapshot, row: StepRow) -> bool:
        """Replay every running episode; False (and fresh episodes) when one does not come out the same."""
        try:
            same = self._replay(snapshot, row)
        except (EnvironmentContractError, KeyError, ValueError):
            same = False
        if not same:
            self._clock, self._history, self._history_from = 0, [], 0
            for i in self._range:
                self._begin(i, row)
        self._running = True
        self._plan_deadline()
        return same

    def _replay(self, snapshot: Snapshot, row: StepRow) -> bool:
        facts, arrays = snapshot.facts, snapshot.arrays
        if facts.get("kind") != "replay" or len(facts["starts"]) != self.num_envs:
            return False
        wanted, lengths = self._layout.from_arrays(arrays), arrays["lengths"].tolist()
        replayed = np.split(arrays["actions"], np.cumsum(lengths)[:-1])
        self._clock = self._history_from = 0
        self._history = []
        infos: list[dict[str, Any]] = []
        for i in self._range:
            self._seeds[i] = int(facts["seeds"][i])
            # Seeding first, for environments that draw a map or a level from the seed and keep it.
            info = self._begin(i, None, seed=self._seeds[i])
            if "seed" not in facts["starts"][i]:
                _set_rng_state(self._envs[i], facts["starts"][i])
                info = self._begin(i, None)
            infos.append(self._replay_one(i, replayed[i], info))
        self._adopt_history(lengths, replayed)
        self._returns = arrays["returns"].tolist()
        for i in self._range:
            self._layout.write(row.observation, i, self._last[i])
            self._write_mask(i, infos[i], row)
        return same_observation(copy_observation(row.observation), wanted)

    def _replay_one(self, i: int, actions: NDArray[Any], info: dict[str, Any]) -> dict[str, Any]:
        """Act as before and give the last info, which holds the mask."""
        try:
            for action in self._split(actions):
                self._last[i], _, terminated, truncated, info = self._steps[i](action)
                if terminated or truncated:
                    raise EnvironmentContractError(f"environment {self._first + i} ended its episode during a replay.")
        except Exception as error:
            raise self._fault(i, error) from error
        return info

    def _adopt_history(self, lengths: list[int], replayed: list[NDArray[Any]]) -> None:
        self._clock = max(lengths)
        self._started = [self._clock - length for length in lengths]
        split = [self._split(actions) for actions in replayed]
        self._history = [
            [split[i][k - self._started[i]] if k >= self._started[i] else None for i in self._range]
            for k in range(self._clock)
        ]

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of each environment, or read an attribute that is not callable."""
        answers = []
        for env in self._envs:
            try:
                found = env.get_wrapper_attr(name)
            except AttributeError as error:
                raise ConfigError("call", name, f"{env.unwrapped} has no such method", "Check the name") from error
            answers.append(found(*args, **kwargs) if callable(found) else found)
        return answers

    def has_method(self, name: str) -> bool:
        """Whether each environment has a method of this name, its own or a wrapper's."""
        return all(env.has_wrapper_attr(name) and callable(env.get_wrapper_attr(name)) for env in self._envs)

    def close(self) -> None:
        """Close every environment, once."""
        if self._closed:
            return
        self._closed, self._running = True, False
        for env in self._made:
            env.close()


def _stripped(env: gymnasium.Env[Any, Any]) -> tuple[gymnasium.Env[Any, Any], int]:
    """The environment below Gymnasium's own outer wrappers, and the time limit they held."""
    limit = sys.maxsize
    while True:
        # Exactly these types: a subclass may do more than we know.
        if type(env) is TimeLimit:
            found = getattr(env, "_max_episode_steps", None)
            if not isinstance(found, int):
                return env, limit
            limit = min(limit, found)
        elif type(env) is not OrderEnforcing and type(env) is not PassiveEnvChecker:
            return env, limit
        env = env.env


def _refuse_mixture(envs: Sequence[gymnasium.Env[Any, Any]]) -> None:
    first = envs[0]
    for i, env in enumerate(envs):
        for kind in ("observation_space", "action_space"):
            if getattr(env, kind) != getattr(first, kind):
                reason = f"environment 0 has {getattr(first, kind)}; all of them must share one space"
                raise ConfigError(f"env[{i}].{kind}", getattr(env, kind), reason, "Make them from one factory")


def _seed_of(seed: int, index: int) -> int:
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0])


def _bit_generator(env: gymnasium.Env[Any, Any]) -> np.random.BitGenerator | None:
    generator = getattr(env.unwrapped, "np_random", None)
    if not isinstance(generator, np.random.Generator):
        return None
    bits = generator.bit_generator
    # The others keep arrays in their state, which is no plain JSON.
    return bits if type(bits).__name__ in _REPLAYABLE else None


def _set_rng_state(env: gymnasium.Env[Any, Any], state: Mapping[str, Any]) -> None:
    """Set the generator in place: the environment's parts may hold references to it."""
    bits = _bit_generator(env)
    if bits is None or type(bits).__name__ != state["bit_generator"]:
        raise ValueError(f"the environment's generator is not the {state['bit_generator']} of the snapshot")
    bits.state = dict(state)
