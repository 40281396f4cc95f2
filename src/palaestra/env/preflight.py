"""A short acquaintance with an environment before anything is launched on it.

Makes one environment, resets it, takes a few random steps and checks what a rollout would trip over later: the shape
and the kind of observations, finite numbers, a reward that is a number, flags that are booleans. Measures what a step
costs. Refuses with a `ConfigError` about `env.id`; keeps nothing: the environment is closed again.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from palaestra.env.spaces import ActionLayout, ObservationLayout, random_actions
from palaestra.errors import ConfigError

__all__ = ["EnvFacts", "inspect_env"]


@dataclass(frozen=True, slots=True)
class EnvFacts:
    """What a few steps taught us about an environment."""

    step_seconds: float
    """Median wall-clock cost of one step."""
    observation_space: gymnasium.Space[Any]
    """As stored: flat and float32."""
    action_space: gymnasium.Space[Any]
    mask_size: int
    """Length of `info["action_mask"]`, 0 when there is none."""
    busy_share: float = 1.0
    """Share of a step in which it keeps a core busy; in the rest it waits for a network, a clock, another process."""


def inspect_env(
    make: Callable[[], gymnasium.Env[Any, Any]],
    *,
    name: str = "",
    steps: int = 5,
    patience_s: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> EnvFacts:
    """Make one environment and try it out; `ConfigError` when training on it could not work.

    Takes at least `steps` steps, and up to a hundred times as many while `patience_s` lasts: faults that need a few
    episodes to show are better found here than in the middle of a run.
    """
    env = make()
    try:
        return _Acquaintance(env, name or str(env), clock).facts(steps, patience_s)
    finally:
        env.close()


def _times_slept() -> int:
    """How often this process has given up its core of its own accord."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


class _Acquaintance:
    def __init__(self, env: gymnasium.Env[Any, Any], name: str, clock: Callable[[], float]) -> None:
        self._env, self._name, self._clock = env, name, clock
        self._layout = ObservationLayout(env.observation_space)
        self._actions = ActionLayout(env.action_space)

    def facts(self, steps: int, patience_s: float) -> EnvFacts:
        info = self._reset()
        mask_size = self._actions.mask_size if info.get("action_mask") is not None else 0
        rng, split = np.random.default_rng(0), self._actions.splitter()
        seconds: list[float] = []
        busy: list[float] = []
        for t in range(1, 100 * steps + 1):
            if t > steps and sum(seconds) >= patience_s:
                break
            mask = self._mask(info, f"step {t}")
            action = split(random_actions(self._env.action_space, 1, rng, mask))[0]
            slept, computed, began = _times_slept(), time.process_time(), self._clock()
            try:
                value, reward, terminated, truncated, info = self._env.step(action)
            except Exception as error:
                raise self._refusal(f"step({action!r}) raised {type(error).__name__}: {error}") from error
            seconds.append(self._clock() - began)
            # A step that never gave up its core did not wait, however long others held that core.
            waited = _times_slept() > slept
            busy.append((time.process_time() - computed) / max(seconds[-1], 1e-9) if waited else 1.0)
            self._check_observation(value, f"step {t}")
            self._check_outcome(reward, terminated, truncated, t)
            if terminated or truncated:
                info = self._reset()
        return EnvFacts(
            statistics.median(seconds) if seconds else 0.0, self._layout.space, self._env.action_space, mask_size,
            min(1.0, statistics.median(busy)) if busy else 1.0,
        )  # fmt: skip

    def _reset(self) -> dict[str, Any]:
        try:
            value, info = self._env.reset(seed=0)
        except Exception as error:
            raise self._refusal(f"reset(seed=0) raised {type(error).__name__}: {error}") from error
        self._check_observation(value, "reset")
        return dict(info)

    def _mask(self, info: dict[str, Any], when: str) -> NDArray[np.bool_] | None:
        if self._actions.mask_size == 0 or info.get("action_mask") is None:
            return None
        try:
            mask = self._actions.read_mask(info["action_mask"])
        except ValueError as error:
            raise self._refusal(f"before {when}, {error}") from error
        if not mask.any():
            raise self._refusal(f"before {when}, info['action_mask'] allows nothing")
        return mask[None]

    def _check_observation(self, value: Any, when: str) -> None:
        try:
            stored = self._layout.single(value)
        except (ValueError, TypeError, KeyError) as error:
            raise self._refusal(f"at {when}, {error}") from error
        for name, array in self._layout.arrays(stored).items():
            if not np.isfinite(array).all():
                raise self._refusal(f"at {when}, {name} holds a number that is not finite")

    def _check_outcome(self, reward: Any, terminated: Any, truncated: Any, t: int) -> None:
        if isinstance(reward, str | bytes) or np.ndim(reward) != 0:
            raise self._refusal(f"at step {t}, the reward is {reward!r}, not one number")
        try:
            number = float(reward)
        except (TypeError, ValueError):
            raise self._refusal(f"at step {t}, the reward is {reward!r}, not a number") from None
        if not np.isfinite(number):
            raise self._refusal(f"at step {t}, the reward is {number}, which is not finite")
        for flag, value in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(value, bool | np.bool_):
                raise self._refusal(f"at step {t}, {flag} is {value!r}, not a bool")

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError("env.id", self._name, reason.rstrip("."), "Fix the environment, or wrap it")
