"""Tries out one environment before training: takes a few random steps, checks the contract and measures the step time.

Checks what would break a rollout later: shape and type of observations, finite numbers, a numeric reward and boolean
flags. Raises a `ConfigError` about `env.id`. The environment is closed again.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from palaestra.env.factory import describe_exception
from palaestra.env.spaces import ActionLayout, ObservationLayout, random_actions
from palaestra.env.vector import Flags, GymEnv, Info, Space
from palaestra.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EnvProperties:
    """Measured properties of an environment."""

    step_seconds: float
    """Median wall-clock time of one step."""
    observation_space: Space
    """As stored: flat and float32."""
    action_space: Space
    mask_size: int
    """Length of `info["action_mask"]`, 0 when there is none."""
    busy_share: float = 1.0
    """Fraction of a step that uses the CPU; the rest is waiting for a network, a clock or another process."""


def inspect_env(
    make: Callable[[], GymEnv],
    *,
    name: str = "",
    steps: int = 5,
    patience_s: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> EnvProperties:
    """Make one environment and try it out; `ConfigError` if training on it could not work.

    Takes at least `steps` steps, and up to a hundred times as many within `patience_s` seconds, to find errors that
    take a few episodes to appear.
    """
    env = make()
    try:
        return _Inspection(env, name or str(env), clock).run(steps, patience_s)
    finally:
        env.close()


def _count_sleeps() -> int:
    """How often this process has slept (voluntary context switches)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


class _Inspection:
    def __init__(self, env: GymEnv, name: str, clock: Callable[[], float]) -> None:
        self._env, self._name, self._clock = env, name, clock
        self._layout = ObservationLayout(env.observation_space)
        self._actions = ActionLayout(env.action_space)

    def run(self, steps: int, patience_s: float) -> EnvProperties:
        info = self._reset()
        mask_size = self._actions.mask_size if info.get("action_mask") is not None else 0
        rng, split = np.random.default_rng(0), self._actions.splitter()
        seconds: list[float] = []
        busy_shares: list[float] = []
        for t in range(1, 100 * steps + 1):
            if t > steps and sum(seconds) >= patience_s:
                break
            mask = self._mask(info, f"step {t}")
            action = split(random_actions(self._env.action_space, 1, rng, mask))[0]
            sleeps_before, cpu_before, start = _count_sleeps(), time.process_time(), self._clock()
            try:
                value, reward, terminated, truncated, info = self._env.step(action)
            except Exception as error:
                raise self._config_error(f"step({action!r}) raised {describe_exception(error)}") from error
            seconds.append(self._clock() - start)
            # A step without a sleep did not wait, even if other processes held the core.
            waited = _count_sleeps() > sleeps_before
            busy_shares.append((time.process_time() - cpu_before) / max(seconds[-1], 1e-9) if waited else 1.0)
            self._check_observation(value, f"step {t}")
            self._check_outcome(reward, terminated, truncated, t)
            if terminated or truncated:
                info = self._reset()
        return EnvProperties(
            step_seconds=statistics.median(seconds),
            observation_space=self._layout.space,
            action_space=self._env.action_space,
            mask_size=mask_size,
            busy_share=min(1.0, statistics.median(busy_shares)),
        )

    def _reset(self) -> Info:
        try:
            value, info = self._env.reset(seed=0)
        except Exception as error:
            raise self._config_error(f"reset(seed=0) raised {describe_exception(error)}") from error
        self._check_observation(value, "reset")
        return dict(info)

    def _mask(self, info: Info, when: str) -> Flags | None:
        if self._actions.mask_size == 0 or info.get("action_mask") is None:
            return None
        try:
            mask = self._actions.read_mask(info["action_mask"])
        except ValueError as error:
            raise self._config_error(f"before {when}, {error}") from error
        if not mask.any():
            raise self._config_error(f"before {when}, info['action_mask'] allows nothing")
        return mask[None]

    def _check_observation(self, value: Any, when: str) -> None:
        try:
            stored = self._layout.single(value)
        except (ValueError, TypeError, KeyError) as error:
            raise self._config_error(f"at {when}, {error}") from error
        for name, array in self._layout.arrays(stored).items():
            if not np.isfinite(array).all():
                raise self._config_error(f"at {when}, {name} holds a number that is not finite")

    def _check_outcome(self, reward: Any, terminated: Any, truncated: Any, t: int) -> None:
        if isinstance(reward, str | bytes) or np.ndim(reward) != 0:
            raise self._config_error(f"at step {t}, the reward is {reward!r}, not one number")
        try:
            number = float(reward)
        except (TypeError, ValueError):
            raise self._config_error(f"at step {t}, the reward is {reward!r}, not a number") from None
        if not np.isfinite(number):
            raise self._config_error(f"at step {t}, the reward is {number}, which is not finite")
        for flag, value in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(value, bool | np.bool_):
                raise self._config_error(f"at step {t}, {flag} is {value!r}, not a bool")

    def _config_error(self, reason: str) -> ConfigError:
        return ConfigError("env.id", self._name, reason.rstrip("."), "Fix the environment, or wrap it")
