"""Environments that are vectorised by their author: one `gymnasium.vector.VectorEnv` that steps N copies at once.

Owns the translation of Gymnasium's three autoreset modes into ours. SAME_STEP is ours already; DISABLED is reset here,
within the step; NEXT_STEP cannot be hidden, so the row after an end is marked `valid = False`: its action was ignored,
its reward is 0 and its observation is the first one of the next episode. At the ending step of a NEXT_STEP environment
the row still shows the final observation, and so does `Ended`.
Snapshots copy what the environment keeps in plain attributes, and are refused when it keeps anything else.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorWrapper
from numpy.typing import NDArray

from palaestra.env.spaces import ActionLayout, ObservationLayout, copy_observation, write_observation
from palaestra.env.vector import Ended, MethodForwarding, Snapshot, StepRow
from palaestra.errors import ConfigError, EnvironmentContractError

__all__ = ["NativeEnv"]

_PLAIN = (bool, int, str, type(None))
_CONSTANT = (gymnasium.Space, EnvSpec, enum.Enum, type)


class NativeEnv(MethodForwarding):
    """A `gymnasium.vector.VectorEnv` as ours."""

    def __init__(self, env: gymnasium.vector.VectorEnv[Any, Any, Any]) -> None:
        self._env = env
        self.num_envs = int(env.num_envs)
        self._layout = ObservationLayout(env.single_observation_space)
        self._actions = ActionLayout(env.single_action_space)
        self.observation_space = self._layout.space
        self.action_space: gymnasium.Space[Any] = env.single_action_space
        self.autoreset_mode = _autoreset_mode(env)
        n = self.num_envs
        self._resetting = np.zeros(n, np.bool_)
        self._returns = np.zeros(n, np.float64)
        self._lengths = np.zeros(n, np.int64)
        self._last = self._layout.empty((n,))
        self._last_mask: NDArray[np.bool_] | None = None
        self._running = False
        self._closed = False
        self.mask_size = self._probe_mask()

    def reset(self, seed: int, row: StepRow) -> None:
        """Start fresh episodes everywhere; the environment spreads the one seed over its copies itself."""
        # Neighbouring run seeds would share streams where an environment seeds copy i with seed + i.
        spread = int(np.random.SeedSequence([seed]).generate_state(1)[0])
        self._resetting[:] = False
        self._returns[:] = 0.0
        self._lengths[:] = 0
        try:
            value, infos = self._env.reset(seed=spread)
            self._layout.write_batch(row.observation, value)
        except Exception as error:
            raise self._fault(error, "in reset()") from error
        self._write_masks(infos, row)
        self._remember(row)
        self._running = True

    def step(self, action: NDArray[Any], row: StepRow) -> list[Ended]:
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
            raise self._fault(error, "in step()") from error
        np.logical_not(ignored, out=row.valid)
        self._returns += np.where(ignored, 0.0, reward)
        self._lengths += row.valid
        over = (row.terminated | row.truncated) & row.valid
        ended = self._ended(over, infos, row) if over.any() else []
        self._write_masks(infos, row)
        if ended and self.autoreset_mode is AutoresetMode.DISABLED:
            self._reset_some(over, row)
        self._resetting = over if self.autoreset_mode is AutoresetMode.NEXT_STEP else np.zeros_like(over)
        self._remember(row)
        return ended

    def _ended(self, over: NDArray[np.bool_], infos: Mapping[str, Any], row: StepRow) -> list[Ended]:
        finals = infos.get("final_obs") if self.autoreset_mode is AutoresetMode.SAME_STEP else None
        if self.autoreset_mode is AutoresetMode.SAME_STEP and finals is None:
            raise EnvironmentContractError(
                f"{self._env} says autoreset_mode SAME_STEP but gave no infos['final_obs'] for an ended episode. "
                "Give the final observations, or declare the mode the environment really has in its metadata."
            )
        ended = []
        for i in np.flatnonzero(over).tolist():
            last = copy_observation(row.observation, i) if finals is None else self._layout.single(finals[i])
            ended.append(Ended(i, last, float(self._returns[i]), int(self._lengths[i])))
        self._returns[over] = 0.0
        self._lengths[over] = 0
        return ended

    def _reset_some(self, over: NDArray[np.bool_], row: StepRow) -> None:
        fresh = self._layout.empty((self.num_envs,))
        try:
            value, infos = self._env.reset(options={"reset_mask": over.copy()})
            self._layout.write_batch(fresh, value)
        except Exception as error:
            raise self._fault(error, "in reset() of ended episodes") from error
        for i in np.flatnonzero(over).tolist():
            write_observation(row.observation, i, copy_observation(fresh, i))
        self._write_masks(infos, row, only=over)

    def _write_masks(self, infos: Mapping[str, Any], row: StepRow, only: NDArray[np.bool_] | None = None) -> None:
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

    def _remember(self, row: StepRow) -> None:
        self._last = copy_observation(row.observation)
        self._last_mask = None if row.action_mask is None else row.action_mask.copy()

    def _probe_mask(self) -> int:
        if self._actions.mask_size == 0:
            return 0
        try:
            _, infos = self._env.reset(seed=0)
        except Exception as error:
            raise self._fault(error, "in reset()") from error
        return self._actions.mask_size if infos.get("action_mask") is not None else 0

    def _fault(self, error: Exception, when: str) -> EnvironmentContractError:
        if isinstance(error, EnvironmentContractError):
            return error
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return EnvironmentContractError(
            f"{self._env}, {when}, {int(self._lengths.max())} steps into an episode: {what}."
        )

    def snapshot(self) -> Snapshot | None:
        """A copy of the environment's plain attributes; None when it keeps anything we cannot copy."""
        # A wrapper between us and the environment may keep state of its own.
        if not self._running or isinstance(self._env, VectorWrapper) or self._env.unwrapped is not self._env:
            return None
        arrays: dict[str, NDArray[Any]] = {}
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
        """Put the attributes back; False (and fresh episodes) when the snapshot is of another environment."""
        facts, arrays = snapshot.facts, snapshot.arrays
        fits = facts.get("kind") == "attributes" and facts.get("env") == type(self._env).__qualname__
        if not fits or len(arrays.get("lengths", ())) != self.num_envs:
            self.reset(0, row)
            return False
        # Creates whatever the environment only makes on its first reset.
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
        self._remember(row)
        self._running = True
        return True

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of each copy, or of the one environment that holds them all (its answer N times)."""
        spread = getattr(self._env, "call", None)
        if callable(spread):
            return list(spread(name, *args, **kwargs))
        found = getattr(self._env.unwrapped, name, None)
        if found is None:
            raise ConfigError("call", name, f"{self._env} has no such method", "Check the name")
        answer = found(*args, **kwargs) if callable(found) else found
        return [answer] * self.num_envs

    def has_method(self, name: str) -> bool:
        """Whether the environments have it; for those in Gymnasium's own processes a fresh copy answers."""
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


def _autoreset_mode(env: gymnasium.vector.VectorEnv[Any, Any, Any]) -> AutoresetMode:
    # Gymnasium's default when nothing is said; one of its own environments misspells the key.
    found = (env.metadata or {}).get("autoreset_mode", AutoresetMode.NEXT_STEP)
    try:
        return AutoresetMode(found)
    except ValueError:
        known = ", ".join(mode.name for mode in AutoresetMode)
        raise ConfigError("env.metadata['autoreset_mode']", found, "unknown autoreset mode", f"Use {known}") from None


def _is_constant_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, (*_PLAIN, float)) for item in value)
