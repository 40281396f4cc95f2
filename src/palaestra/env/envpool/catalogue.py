"""The ids of EnvPool: which of them can be trained on, how Gymnasium's spellings map to them, and their settings.

`envpool` is an optional package and takes a second to import, so it is imported here when it is used. Supported are the
families whose episodes were checked to depend on seed and actions alone and to end exactly at the time limit.
"""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from palaestra.config import closest_names
from palaestra.env.vector import Space
from palaestra.errors import ConfigError, UnknownEnvironment

INSTALL = "pip install 'palaestra[envpool]'"

_FAMILIES = {
    "envpool.atari": "Atari",
    "envpool.box2d": "Box2D",
    "envpool.classic_control": "classic control",
    "envpool.mujoco.gym": "MuJoCo",
    "envpool.mujoco.metaworld": "Meta-World",
    "envpool.mujoco.robotics": "robotics",
    "envpool.toy_text": "toy text",
}
"""Supported families by their module in EnvPool. dm_control, for one, does not repeat its episodes from a seed."""

_CHEAP = ("classic control", "toy text")
_NO_LIMIT = 2**31 - 1
_OURS = {
    "num_envs": "env.num_envs",
    "num_threads": "env.num_workers",
    "max_episode_steps": "env.max_episode_steps",
    "seed": "trainer.seed",
    "env_seed": "trainer.seed",
    "batch_size": "",
    "max_num_players": "",
    "gym_reset_return_info": "",
    "render_mode": "",
}
"""Arguments of EnvPool that other settings give, or that would change the meaning of a step."""


@dataclass(frozen=True)
class PoolSpec:
    """One environment of EnvPool with its settings; makes pools of it."""

    id: str
    """EnvPool's id."""
    family: str
    observation_space: Space
    action_space: Space
    max_episode_steps: int | None
    """Time limit of an episode; None if it has none."""
    kwargs: Mapping[str, Any]

    @property
    def is_cheap(self) -> bool:
        """Whether waking a thread takes longer than a step."""
        return self.family in _CHEAP

    @property
    def counts_own_steps(self) -> bool:
        """Whether EnvPool must apply the time limit itself: a life of an Atari game ends an episode, not the game."""
        return self.family == "Atari"

    def make_pool(self, num_envs: int, num_threads: int, seeds: list[int]) -> Any:
        """A new pool, whose environment `i` has the seed `seeds[i]`."""
        limit = _NO_LIMIT if self.max_episode_steps is None else self.max_episode_steps
        if not self.counts_own_steps:
            # One more than ours, so that an end in the last step is a termination: EnvPool reports a step that
            # terminates at its limit as truncated.
            limit = min(limit + 1, _NO_LIMIT)
        settings = {"num_envs": num_envs, "num_threads": num_threads, "env_seed": seeds, "max_episode_steps": limit}
        try:
            with _suppress_warnings():
                return _import().make_gymnasium(self.id, **settings, **self.kwargs)
        except Exception as error:
            raise _settings_error(self.id, self.kwargs, error) from error


def find_spec(env_id: str, kwargs: Mapping[str, Any], max_episode_steps: int | None) -> PoolSpec:
    """The environment of a configuration; `ConfigError` if EnvPool cannot provide it."""
    name = find_id(env_id)
    family = _FAMILIES[_registry()[name][0]]
    for key, place in _OURS.items():
        if key in kwargs:
            remedy = f"Use {place}" if place else f"Leave env.kwargs.{key} out"
            raise ConfigError(f"env.kwargs.{key}", kwargs[key], "is not a setting of the environment", remedy)
    try:
        with _suppress_warnings():
            spec = _import().make_spec(name, **kwargs)
            observation_space, action_space = spec.observation_space, spec.action_space
            limit = int(spec.config.max_episode_steps) if max_episode_steps is None else max_episode_steps
    except Exception as error:
        raise _settings_error(name, kwargs, error) from error
    return PoolSpec(
        id=name,
        family=family,
        observation_space=_without_false_bounds(observation_space),
        action_space=action_space,
        max_episode_steps=None if limit >= _NO_LIMIT else limit,
        kwargs=dict(kwargs),
    )


def pool_ids() -> list[str]:
    """The ids of all supported environments of EnvPool, sorted; `UnknownEnvironment` if it is not installed."""
    return sorted(name for name, (module, *_) in _registry().items() if module in _FAMILIES)


def find_id(env_id: str) -> str:
    """EnvPool's name of an environment; `UnknownEnvironment` if it has none."""
    registered = _registry()
    name = env_id
    if name not in registered and name.startswith("ALE/"):
        name = name.removeprefix("ALE/")
    if name not in registered:
        raise _unknown_id_error(env_id)
    if registered[name][0] not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES.values()))
        reason = f"of EnvPool's environments, only these families are supported: {known}"
        remedy = "Leave env.backend out" if env_id in gymnasium.registry else "Choose another environment"
        raise UnknownEnvironment("env.id", env_id, reason, remedy)
    return name


def _unknown_id_error(env_id: str) -> UnknownEnvironment:
    close = closest_names(env_id.removeprefix("ALE/"), pool_ids())
    nearest = f"its nearest: {', '.join(close)}" if close else "`palaestra envs --backend envpool` lists its ids"
    is_address = ":" in env_id
    if is_address or env_id in gymnasium.registry or env_id.startswith("compiled/"):
        reason = "EnvPool has only its own environments" if is_address else "EnvPool has no such environment"
        return UnknownEnvironment(
            "env.id", env_id, reason, f"Leave env.backend out to use the Gymnasium environment ({nearest})"
        )
    nearest = nearest[0].upper() + nearest[1:]
    return UnknownEnvironment("env.id", env_id, "neither EnvPool nor Gymnasium has this environment", nearest)


def _settings_error(name: str, kwargs: Mapping[str, Any], error: Exception) -> ConfigError:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, ImportError) or not kwargs:
        reason = f"EnvPool cannot make it ({text})"
        return UnknownEnvironment("env.id", name, reason, "Install what it names, or leave env.backend out")
    return ConfigError("env.kwargs", dict(kwargs), f"EnvPool's {name} does not take these ({text})", "Change them")


def _without_false_bounds(space: Space) -> Space:
    """The space with the bounds that EnvPool writes for "unbounded" (the smallest positive number) as infinities."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: _without_false_bounds(part) for name, part in space.spaces.items()})
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        return space
    limits = np.finfo(space.dtype)
    low = np.where(space.low == limits.tiny, -np.inf, space.low).astype(space.dtype)
    high = np.where(space.high == limits.max, np.inf, space.high).astype(space.dtype)
    return spaces.Box(low, high, space.shape, space.dtype.type)


def _registry() -> Mapping[str, Any]:
    """Module, class and settings of each id."""
    specs: Mapping[str, Any] = _import().registration.registry.specs
    return specs


def _import() -> Any:
    if importlib.util.find_spec("envpool") is None:
        raise UnknownEnvironment("env.backend", "envpool", "the package envpool is not installed", INSTALL)
    import envpool

    return envpool


@contextlib.contextmanager
def _suppress_warnings() -> Iterator[None]:
    """Hide warnings about the precision of bounds: observations are stored as float32 anyway."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
