"""Adapter for `gymnasium.vector.VectorEnv`: environments whose authors vectorised them.

Translates Gymnasium's three autoreset modes. SAME_STEP is ours already; for DISABLED the reset happens here, within the
step. NEXT_STEP cannot be hidden: the row after an end has `valid = False`, because its action was ignored, its reward
is 0 and its observation is the first of the next episode; the row of the end itself still has the final observation.
Snapshots copy the plain attributes of the environment; there is no snapshot if it has any other attributes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorWrapper

from palaestra.env.factory import describe_exception, locate_user_code
from palaestra.env.spaces import ActionLayout, ObservationLayout, copy_observation, write_observation
from palaestra.env.vector import Array, EpisodeEnd, Flags, MethodForwarding, Snapshot, Space, StepRow
from palaestra.errors import ConfigError, EnvironmentContractError

_PLAIN = (bool, int, str, type(None))
GymVectorEnv: TypeAlias = gymnasium.vector.VectorEnv[Any, Any, Any]

_CONSTANT = (gymnasium.Space, EnvSpec, enum.Enum, type)


class NativeEnv(MethodForwarding):
    """A `gymnasium.vector.VectorEnv` as a `VectorEnv`."""

    def __init__(self, env: GymVectorEnv, *, first_index: int = 0) -> None:
        """`first_index`: number of the first copy among those of several processes, which get different episodes."""
        self._env, self._first = env, first_index
        self.num_envs = int(env.num_envs)
        self._layout = ObservationLayout(env.single_observation_space)
        self._actions = ActionLayout(env.single_action_space)
        self.observation_space = self._layout.space
        self.action_space: Space = env.single_action_space
        self.autoreset_mode = _autoreset_mode(env)
        n = self.num_envs
        self._resetting = np.zeros(n, np.bool_)
        self._returns = np.zeros(n, np.float64)
        self._lengths = np.zeros(n, np.int64)
        self._last = self._layout.empty((n,))
        self._last_mask: Flags | None = None
        self._running = False
        self._closed = False
        self.mask_size = self._probe_mask()

    def reset(self, seed: int, row: StepRow) -> None:
        """Start new episodes; the environment derives the seeds of its copies from one seed."""
        # Environments often seed copy i with seed + i; hashing keeps neighbouring run seeds apart.
        own = [seed, self._first] if self._first else [seed]
        env_seed = int(np.random.SeedSequence(own).generate_state(1)[0])
        self._resetting[:] = False
        self._returns[:] = 0.0
        self._lengths[:] = 0
        try:
            value, infos = self._env.reset(seed=env_seed)
            self._layout.write_batch(row.observation, value)
        except Exception as error:
            raise self._contract_error(error, "in reset()") from error
        self._write_masks(infos, row)
        self._save_last(row)
        self._running = True

    def step(self, action: Array, row: StepRow) -> list[EpisodeEnd]:
        """Act in all copies at once."""
        if not self._running:
            raise EnvironmentContractError("step() was called before reset(). Call reset(seed, row) first.")
        ignored = self._resetting
        try:
            value, reward, terminated, truncated, infos = self._env.step(self._actions.batch(action))
            self._layout.write_batch(row.observation, value)
            row.reward[:] = reward
            row.terminated[:] = terminated
            row.truncated[:] = truncated
        except Exception as error:
            raise self._contract_error(error, "in step()") from error
        np.logical_not(ignored, out=row.valid)
        self._returns += np.where(ignored, 0.0, reward)
        self._lengths += row.valid
        over = (row.terminated | row.truncated) & row.valid
        ended = self._collect_ends(over, infos, row) if over.any() else []
        self._write_masks(infos, row)
        if ended and self.autoreset_mode is AutoresetMode.DISABLED:
            self._reset_ended(over, row)
        self._resetting = over if self.autoreset_mode is AutoresetMode.NEXT_STEP else np.zeros_like(over)
        self._save_last(row)
        return ended

    def _collect_ends(self, over: Flags, infos: Mapping[str, Any], row: StepRow) -> list[EpisodeEnd]:
        finals = infos.get("final_obs") if self.autoreset_mode is AutoresetMode.SAME_STEP else None
        if self.autoreset_mode is AutoresetMode.SAME_STEP and finals is None:
            raise EnvironmentContractError(
                f"{self._env} declares autoreset_mode SAME_STEP but returned no infos['final_obs']. "
                "Return the final observations, or declare the actual autoreset mode in the metadata."
            )
        ended = []
        for i in np.flatnonzero(over).tolist():
            last = copy_observation(row.observation, i) if finals is None else self._layout.single(finals[i])
            ended.append(EpisodeEnd(i, last, float(self._returns[i]), int(self._lengths[i])))
        self._returns[over] = 0.0
        self._lengths[over] = 0
        return ended

    def _reset_ended(self, over: Flags, row: StepRow) -> None:
        fresh = self._layout.empty((self.num_envs,))
        try:
            value, infos = self._env.reset(options={"reset_mask": over.copy()})
            self._layout.write_batch(fresh, value)
        except Exception as error:
            raise self._contract_error(error, "in reset() of ended episodes") from error
        for i in np.flatnonzero(over).tolist():
            write_observation(row.observation, i, copy_observation(fresh, i))
        self._write_masks(infos, row, only=over)

    def _write_masks(self, infos: Mapping[str, Any], row: StepRow, only: Flags | None = None) -> None:
        if row.action_mask is None:
            return
        rows = np.ones(self.num_envs, np.bool_) if only is None else only
        row.action_mask[rows] = True
        masks = infos.get("action_mask")
        if masks is None:
            return
        given = np.asarray(infos.get("_action_mask", np.ones(self.num_envs, np.bool_)))
        for i in np.flatnonzero(rows & given).tolist():
            row.action_mask[i] = self._actions.read_mask(masks[i])

    def _save_last(self, row: StepRow) -> None:
        self._last = copy_observation(row.observation)
        self._last_mask = None if row.action_mask is None else row.action_mask.copy()

    def _probe_mask(self) -> int:
        if self._actions.mask_size == 0:
            return 0
        try:
            _, infos = self._env.reset(seed=0)
        except Exception as error:
            raise self._contract_error(error, "in reset()") from error
        return self._actions.mask_size if infos.get("action_mask") is not None else 0

    def _contract_error(self, error: Exception, when: str) -> EnvironmentContractError:
        if isinstance(error, EnvironmentContractError):
            return error
        what = (
            str(error) if isinstance(error, ValueError) and not locate_user_code(error) else describe_exception(error)
        )
        return EnvironmentContractError(
            f"{self._env}, {when}, {int(self._lengths.max())} steps into an episode: {what}."
        )

    def snapshot(self) -> Snapshot | None:
        """A copy of the plain attributes of the environment; None if it has attributes that cannot be copied."""
        # A wrapper may have state, too.
        if not self._running or isinstance(self._env, VectorWrapper) or self._env.unwrapped is not self._env:
            return None
        arrays: dict[str, Array] = {}
        plain: dict[str, Any] = {}
        floats: list[str] = []
        for name, value in vars(self._env).items():
            if isinstance(value, np.ndarray | np.generic) and value.dtype != np.dtype(object):
                arrays[f"attribute/{name}"] = np.array(value)
            elif isinstance(value, float):
                # As an array, because JSON has no infinity.
                arrays[f"attribute/{name}"] = np.array(value)
                floats.append(name)
            elif isinstance(value, np.random.Generator):
                plain[name] = {"generator": dict(value.bit_generator.state)}
                if type(value.bit_generator).__name__ != "PCG64":
                    return None
            elif isinstance(value, _PLAIN):
                plain[name] = value
            elif not isinstance(value, _CONSTANT) and not _is_constant_tuple(value):
                return None
        arrays |= {"resetting": self._resetting.copy(), "returns": self._returns.copy()}
        arrays |= {"lengths": self._lengths.copy(), **self._layout.arrays(copy_observation(self._last))}
        if self._last_mask is not None:
            arrays["action_mask"] = self._last_mask.copy()
        facts = {"kind": "attributes", "env": type(self._env).__qualname__, "plain": plain, "floats": floats}
        return Snapshot(arrays, facts)

    def restore(self, snapshot: Snapshot, row: StepRow) -> bool:
        """Set the attributes; False (and new episodes) if the snapshot belongs to another environment."""
        facts, arrays = snapshot.facts, snapshot.arrays
        fits = facts.get("kind") == "attributes" and facts.get("env") == type(self._env).__qualname__
        if not fits or len(arrays.get("lengths", ())) != self.num_envs:
            self.reset(0, row)
            return False
        # Creates the attributes that the environment sets in its first reset.
        self._env.reset(seed=0)
        for name, value in facts["plain"].items():
            if isinstance(value, Mapping):
                bits = np.random.PCG64()
                bits.state = value["generator"]
                setattr(self._env, name, np.random.Generator(bits))
            else:
                setattr(self._env, name, value)
        for key, array in arrays.items():
            kind, _, name = key.partition("/")
            if kind == "attribute":
                shaped = np.array(array) if array.ndim else array[()]
                setattr(self._env, name, float(shaped) if name in facts["floats"] else shaped)
        self._resetting = np.array(arrays["resetting"])
        self._returns, self._lengths = np.array(arrays["returns"]), np.array(arrays["lengths"])
        write_observation(row.observation, ..., self._layout.from_arrays(arrays))
        if row.action_mask is not None:
            row.action_mask[...] = arrays.get("action_mask", np.True_)
        self._save_last(row)
        self._running = True
        return True

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of each copy, or of the one environment that holds all copies (its result N times)."""
        call = getattr(self._env, "call", None)
        if callable(call):
            return list(call(name, *args, **kwargs))
        attribute = getattr(self._env.unwrapped, name, None)
        if attribute is None:
            raise ConfigError("call", name, f"{self._env} has no such method", "Check the name")
        result = attribute(*args, **kwargs) if callable(attribute) else attribute
        return [result] * self.num_envs

    def has_method(self, name: str) -> bool:
        """Whether the environments have this method; for environments in other processes, a new copy is checked."""
        inner = self._env.unwrapped
        if not hasattr(inner, "env_fns"):
            return callable(getattr(inner, name, None))
        copies = getattr(inner, "envs", None)
        env = copies[0] if copies else inner.env_fns[0]()
        try:
            return bool(env.has_wrapper_attr(name)) and callable(env.get_wrapper_attr(name))
        finally:
            if not copies:
                env.close()

    def close(self) -> None:
        """Close the environment, once."""
        if not self._closed:
            self._closed, self._running = True, False
            self._env.close()


def _autoreset_mode(env: GymVectorEnv) -> AutoresetMode:
    # The default is Gymnasium's; one Gymnasium environment misspells the key.
    mode = (env.metadata or {}).get("autoreset_mode", AutoresetMode.NEXT_STEP)
    try:
        return AutoresetMode(mode)
    except ValueError:
        known = ", ".join(item.name for item in AutoresetMode)
        raise ConfigError("env.metadata['autoreset_mode']", mode, "unknown autoreset mode", f"Use {known}") from None


def _is_constant_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, (*_PLAIN, float)) for item in value)
