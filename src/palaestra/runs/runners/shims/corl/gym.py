"""The interface of Gym 0.23 that scripts of CORL use, on Gymnasium.

`reset` returns an observation, `step` returns four values, and `seed` takes effect at the next reset. The actions of an
environment go from -1 to 1, as those of D4RL do and as several scripts assume; other bounds are scaled. Environments
offer the dataset and the normalised score of the module `d4rl` beside this one. Python 3.8+.
"""

from __future__ import annotations

import json
import os
import types
from collections.abc import Callable
from typing import Any

import d4rl
import gymnasium
import numpy as np
from gymnasium import spaces

__version__ = "0.23.1"
OBSERVATION_FILE = "observations.json"
"""How the script transforms observations, in its working directory; its checkpoints do not say it."""


class GymEnv:
    """An environment of Gymnasium with the methods of Gym 0.23."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.unwrapped = self
        self._pending_seed: int | None = None
        self._low, self._high = d4rl.action_range()
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        if self._low is not None:
            self.action_space = spaces.Box(-1.0, 1.0, env.action_space.shape, np.float32)
        self.spec = env.spec
        self.metadata = env.metadata
        self.reward_range = (-float("inf"), float("inf"))
        self.ref_min_score = d4rl.settings().get("random_score")
        self.ref_max_score = d4rl.settings().get("expert_score")

    @property
    def _max_episode_steps(self) -> int:
        steps = self.spec.max_episode_steps
        if steps is None:
            raise AttributeError(f"{self.spec.id} has no limit of steps per episode")
        return int(steps)

    def seed(self, seed: int | None = None) -> list[int | None]:
        """Seed the episodes from the next reset on."""
        self._pending_seed = seed
        return [seed]

    def reset(self, **kwargs: Any) -> Any:
        """Begin an episode; returns its first observation."""
        seed, self._pending_seed = kwargs.pop("seed", self._pending_seed), None
        observation, _ = self._env.reset(seed=seed, **kwargs)
        return observation

    def step(self, action: Any) -> Any:
        """Observation, reward, whether the episode ended for any reason, and info."""
        if self._low is not None:
            action = self._low + (np.clip(action, -1.0, 1.0) + 1.0) * 0.5 * (self._high - self._low)
        observation, reward, terminated, truncated, info = self._env.step(action)
        if truncated:
            info = {**info, "TimeLimit.truncated": not terminated}
        return observation, float(reward), bool(terminated or truncated), info

    def render(self, mode: str = "human", **_: Any) -> Any:
        """A frame, if the environment was made with a render mode."""
        return self._env.render()

    def close(self) -> None:
        """Release the environment."""
        self._env.close()

    def get_dataset(self, **_: Any) -> dict[str, Any]:
        """The dataset with the ends of episodes; the caller may change the arrays."""
        return {name: np.array(values) for name, values in d4rl.load_arrays().items()}

    def get_normalized_score(self, score: Any) -> Any:
        """A return as a fraction of the way from a random policy to an expert."""
        return d4rl.get_normalized_score(self.spec.id, score)


class GymWrapper:
    """An environment around another one, whose attributes it shares."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        if name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)


class GymTransformObservation(GymWrapper):
    """Applies a function to every observation, and writes down what the function does."""

    def __init__(self, env: Any, f: Callable[[Any], Any]) -> None:
        super().__init__(env)
        self.f = f
        _write_transform(f, env.observation_space.shape)

    def reset(self, **kwargs: Any) -> Any:
        """Begin an episode; returns its first observation, transformed."""
        return self.f(self.env.reset(**kwargs))

    def step(self, action: Any) -> Any:
        """As the environment, with the observation transformed."""
        observation, reward, done, info = self.env.step(action)
        return self.f(observation), reward, done, info


class GymTransformReward(GymWrapper):
    """Applies a function to every reward."""

    def __init__(self, env: Any, f: Callable[[float], float]) -> None:
        super().__init__(env)
        self.f = f

    def step(self, action: Any) -> Any:
        """As the environment, with the reward transformed."""
        observation, reward, done, info = self.env.step(action)
        return observation, self.f(reward), done, info


def make(env_id: str, **kwargs: Any) -> GymEnv:
    """Make an environment of Gymnasium with the arguments and the time limit of the dataset."""
    recorded = d4rl.settings()
    limit = {"max_episode_steps": recorded.get("max_episode_steps")}
    return GymEnv(gymnasium.make(env_id, **{**limit, **recorded.get("env_kwargs", {}), **kwargs}))


def _write_transform(f: Callable[[Any], Any], shape: tuple[int, ...]) -> None:
    """Store scale and offset of a function that is affine in every number; nothing if it is not."""
    zero, one = np.zeros(shape), np.ones(shape)
    try:
        offset = np.asarray(f(zero), np.float64)
        scale = np.asarray(f(one), np.float64) - offset
        at_two = np.asarray(f(2.0 * one), np.float64)
    except Exception:  # noqa: BLE001 - a function of the script; without the file its checkpoints do not play
        return
    if offset.shape == shape and np.allclose(at_two, offset + 2.0 * scale, rtol=1e-4, atol=1e-6):
        temporary = OBSERVATION_FILE + ".tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({"scale": scale.tolist(), "offset": offset.tolist()}, file)
        os.replace(temporary, OBSERVATION_FILE)


Env, Wrapper = GymEnv, GymWrapper
wrappers = types.SimpleNamespace(TransformObservation=GymTransformObservation, TransformReward=GymTransformReward)
