"""From the `env` section of a configuration to environments that can be stepped.

Owns the choice between stepping in this process, in workers and natively, and the list of what can be trained on.
Refuses unknown names with the nearest known ones, before anything is launched. Whatever a user hands in (an id, one
Gymnasium environment, a list, a vector environment) becomes ours in `as_vector_env`. Driven by `train` and `cli`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import gymnasium
from gymnasium import error as gymnasium_error
from pydantic import Field

from palaestra.config import Section
from palaestra.env.in_process import InProcessEnv
from palaestra.env.native import NativeEnv
from palaestra.env.preflight import EnvFacts, inspect_env
from palaestra.env.recipe import EnvRecipe, missing_dependency, quiet_gymnasium
from palaestra.env.vector import VectorEnv
from palaestra.env.workers import WorkerEnv, usable_cores
from palaestra.errors import ConfigError

__all__ = ["COMPILED", "EnvConfig", "KnownEnvironment", "as_vector_env", "known_environments", "make_env"]

COMPILED = {"compiled/CartPole-v1": "palaestra.env.compiled_cartpole:CompiledCartPole"}
"""Environments of ours that step all copies in compiled code; imported when asked for."""

_REGISTERED = {
    "palaestra/TableReach-v0": ("palaestra.env.table:TableReach", 25),
    "palaestra/TablePush-v0": ("palaestra.env.table:TablePush", 50),
    "palaestra/TableReachMujoco-v0": ("palaestra.env.table_mujoco:TableReachMujoco", 25),
}
"""Environments of ours under their Gymnasium ids, with their time limits; imported when made."""

_TOYS = ("Bandit", "Countdown", "Gate", "MaskedChoice", "MixedSenses", "Pixels", "TargetReach")
_NATIVE_FROM = 16
"""Copies from which numpy over all of them beats a Python loop over each."""
_WORKERS_FROM_S = 2e-3
"""A step of all copies cheaper than this is not worth other processes: on a busy machine waking them takes as long."""
_WAITS_BELOW = 0.75
"""An environment that keeps a core busy for a smaller share of its step counts as waiting."""
_MOST_WORKERS = 32
"""Processes that are started without being asked for by number; each takes some 60 MB and a second to start."""


class EnvConfig(Section):
    """Which environment, how many, and how they are stepped."""

    id: str
    """A Gymnasium id (`CartPole-v1`), the address of a class or function that makes an environment
    (`my_package.tasks:Maze`), or one of our compiled environments (`compiled/CartPole-v1`)."""

    num_envs: int = Field(default=8, ge=1, le=65_536)
    """Copies stepped together. More give less correlated batches and fewer updates per environment step."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Handed to the environment's constructor as they are."""

    vectorization: Literal["auto", "in_process", "workers", "native"] = "auto"
    """`in_process` steps one after the other and is right for cheap environments; `workers` shares them out over
    processes; `native` uses the environment's own vectorised form. `auto` measures a few steps and decides: workers
    where a step of all copies takes more than 2 ms."""

    num_workers: int | None = Field(default=None, ge=1)
    """Processes for `workers`, the training process among them. null: one per core; for environments that spend their
    step waiting (for a network, a simulator, a clock) as many as wait at once, up to 32. Never more than `num_envs`."""

    max_episode_steps: int | None = Field(default=None, ge=1)
    """Cuts episodes after so many steps (truncation: their future still counts). By default the registered limit."""

    action_chunk: int = Field(default=1, ge=1, le=1024)
    """Actions per decision, executed one after the other without looking (Box actions, policies that act in chunks).
    A step then is a decision: its reward is the sum over the chunk, and `gamma` counts decisions."""

    normalize_observation: bool = False
    """Shift and scale observations by running statistics, kept in the checkpoint. Continuous control needs it;
    images and small classic tasks do not."""

    normalize_reward: bool = False
    """Scale rewards by the spread of the discounted return. Returns are still reported as the environment paid them."""


for _id, (_entry_point, _limit) in _REGISTERED.items():
    gymnasium.register(_id, entry_point=_entry_point, max_episode_steps=_limit)


@dataclass(frozen=True, slots=True)
class KnownEnvironment:
    """One line of `palaestra envs`."""

    id: str
    origin: Literal["gymnasium", "compiled", "toy"]
    installed: bool
    remedy: str = ""
    """How to install what is missing; empty when nothing is."""


def make_env(config: EnvConfig) -> VectorEnv:
    """Make the environments a configuration asks for; `ConfigError` before anything is launched if that cannot be."""
    if config.id in COMPILED:
        return _compiled(config)
    recipe = EnvRecipe(config.id, config.kwargs, config.max_episode_steps, config.action_chunk)
    spec = recipe.spec()
    if config.action_chunk > 1:
        return _one_by_one(config, recipe)
    has_native = spec is not None and spec.vector_entry_point is not None
    if config.vectorization == "native" or (
        config.vectorization == "auto" and has_native and config.num_envs >= _NATIVE_FROM
    ):
        return _native(config, recipe, has_native)
    if spec is not None and spec.entry_point is None:
        return _native(config, recipe, has_native)
    return _one_by_one(config, recipe)


def _one_by_one(config: EnvConfig, recipe: EnvRecipe) -> VectorEnv:
    """Copies of the single environment, here or in workers."""
    facts = inspect_env(recipe, name=config.id, patience_s=0.1)
    processes = min(config.num_workers or _useful_processes(facts), config.num_envs)
    slow = facts.step_seconds * config.num_envs > _WORKERS_FROM_S
    if config.vectorization == "workers" or (config.vectorization == "auto" and slow and processes > 1):
        return WorkerEnv(recipe, config.num_envs, processes, facts=facts)
    return InProcessEnv(recipe, config.num_envs, mask_size=facts.mask_size)


def _useful_processes(facts: EnvFacts) -> int:
    """One per core; more for environments that wait, because those that wait need no core."""
    cores = usable_cores()
    if facts.busy_share >= _WAITS_BELOW:
        return cores
    return max(cores, min(_MOST_WORKERS, math.ceil(cores / max(facts.busy_share, 1e-3))))


def as_vector_env(env: Any, *, num_envs: int = 8) -> VectorEnv:
    """Whatever stands for an environment, as ours. `num_envs` counts only where an id says nothing about it."""
    if isinstance(env, str):
        return make_env(EnvConfig(id=env, num_envs=num_envs))
    if isinstance(env, EnvConfig):
        return make_env(env)
    if isinstance(env, gymnasium.vector.VectorEnv):
        return NativeEnv(env)
    if isinstance(env, gymnasium.Env):
        return InProcessEnv.of([env])
    if isinstance(env, Sequence) and env and all(isinstance(one, gymnasium.Env) for one in env):
        return InProcessEnv.of(env)
    if all(hasattr(env, name) for name in ("num_envs", "mask_size", "step", "snapshot", "restore")):
        return cast(VectorEnv, env)
    kinds = "an id, a gymnasium.Env or a list of them, a gymnasium.vector.VectorEnv or a palaestra VectorEnv"
    raise ConfigError("env", env, f"a {type(env).__name__} is not an environment", f"Give {kinds}")


def known_environments() -> list[KnownEnvironment]:
    """Everything that can be named here and whether its dependency is installed; makes no environment."""
    known = [KnownEnvironment(name, "compiled", True) for name in COMPILED]
    known += [KnownEnvironment(f"palaestra.env.toy:{name}", "toy", True) for name in _TOYS]
    for name in sorted(gymnasium.registry):
        spec = gymnasium.registry[name]
        missing = missing_dependency(spec.entry_point or spec.vector_entry_point)
        known.append(KnownEnvironment(name, "gymnasium", missing is None, missing[1] if missing else ""))
    return known


def _compiled(config: EnvConfig) -> VectorEnv:
    if config.action_chunk > 1:
        reason = f"{config.id} takes one discrete action per step"
        raise ConfigError("env.action_chunk", config.action_chunk, reason, "Leave env.action_chunk out")
    module, _, name = COMPILED[config.id].partition(":")
    make = getattr(importlib.import_module(module), name)
    kwargs = dict(config.kwargs)
    if config.max_episode_steps is not None:
        kwargs["max_episode_steps"] = config.max_episode_steps
    try:
        return cast(VectorEnv, make(num_envs=config.num_envs, **kwargs))
    except TypeError as error:
        raise ConfigError("env.kwargs", kwargs, f"{config.id} does not take these ({error})") from error


def _native(config: EnvConfig, recipe: EnvRecipe, has_native: bool) -> VectorEnv:
    if not has_native:
        reason = f"{config.id} has no vectorised form of its own"
        raise ConfigError("env.vectorization", config.vectorization, reason, "Use 'auto', 'in_process' or 'workers'")
    kwargs = dict(config.kwargs)
    if config.max_episode_steps is not None:
        kwargs["max_episode_steps"] = config.max_episode_steps
    try:
        with quiet_gymnasium():
            env = gymnasium.make_vec(config.id, config.num_envs, vectorization_mode="vector_entry_point", **kwargs)
    except TypeError as error:
        raise ConfigError("env.kwargs", kwargs, f"{config.id} does not take these ({error})") from error
    except (gymnasium_error.DependencyNotInstalled, ImportError) as error:
        raise recipe.needs(error) from error
    return NativeEnv(env)
