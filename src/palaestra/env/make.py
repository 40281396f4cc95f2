"""Builds vector environments from the `env` section of a configuration, and lists the known environments.

`make_env` chooses between stepping in this process, in worker processes and with the environment's own vectorised form.
`as_vector_env` also accepts Gymnasium environments. Unknown names are refused with the closest known ones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal, cast

import gymnasium
from gymnasium import error as gymnasium_error
from pydantic import Field

from palaestra.config import Section, import_address
from palaestra.env.envpool.catalogue import find_id, pool_ids
from palaestra.env.envpool.pool import EnvPoolEnv
from palaestra.env.factory import EnvFactory, missing_dependency, suppress_gymnasium_warnings
from palaestra.env.in_process import InProcessEnv
from palaestra.env.inspection import EnvProperties, inspect_env
from palaestra.env.native import NativeEnv
from palaestra.env.vector import VectorEnv
from palaestra.env.workers import WorkerEnv
from palaestra.errors import ConfigError
from palaestra.processes.children import usable_cores

GROUP = "palaestra.environments"
"""Entry points of packages that register environments with Gymnasium."""
COMPILED = {"compiled/CartPole-v1": "palaestra.env.compiled_cartpole:CompiledCartPole"}
"""Environments that step all copies in compiled code; imported when used."""

_log = logging.getLogger(__name__)
_REGISTERED = {
    "palaestra/TableReach-v0": ("palaestra.env.table:TableReach", 25),
    "palaestra/TablePush-v0": ("palaestra.env.table:TablePush", 50),
    "palaestra/GridWorld-v0": ("palaestra.env.grid_world:GridWorld", 100),
    "palaestra/TableReachMujoco-v0": ("palaestra.env.table.mujoco:TableReachMujoco", 25),
}
"""Entry point and time limit of the environments that we register with Gymnasium; imported when made."""

_TOYS = ("Bandit", "Countdown", "Gate", "MaskedChoice", "MixedSenses", "Pixels", "TargetReach")
MIN_NATIVE_ENVS = 16
"""Number of copies from which NumPy over all of them is faster than a Python loop."""
_MIN_WORKER_STEP_S = 2e-3
"""A faster step of all copies does not use workers: waking them takes as long on a busy machine."""
_BUSY_SHARE = 0.75
"""An environment that keeps a core busy for less than this share of its step counts as waiting."""
_MAX_AUTO_WORKERS = 32
"""Most processes started unless `num_workers` asks for more; each takes about 60 MB and a second to start."""


EPISODE_LIMIT = 30_000
"""Steps after which evaluations and collections cut off an episode of an environment without a time limit. A policy
that walks into a wall would otherwise never end it. An episode of Atari has at most 27,000."""


class EnvConfig(Section):
    """The environment, the number of copies, and how they are stepped."""

    id: str
    """A Gymnasium id (`CartPole-v1`), the address of a class or function that makes an environment
    (`my_package.tasks:Maze`), or a compiled environment (`compiled/CartPole-v1`)."""

    num_envs: int = Field(default=8, ge=1, le=65_536)
    """Copies stepped together. More give less correlated batches and fewer updates per environment step."""

    backend: Literal["gymnasium", "envpool"] = "gymnasium"
    """`envpool` steps the C++ environments of EnvPool (classic control, Box2D, MuJoCo, Atari, …; docs/scale.md). Their
    names are mostly those of Gymnasium (`palaestra envs --backend envpool`). Needs `palaestra[envpool]`."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's constructor."""

    vectorization: Literal["auto", "in_process", "workers", "native"] = "auto"
    """`in_process` steps the copies one after the other, best for cheap environments; `workers` divides them among
    processes; `native` uses the environment's own vectorised form. `auto` measures a few steps and uses workers if a
    step of all copies takes more than 2 ms."""

    num_workers: int | None = Field(default=None, ge=1)
    """Number of processes for `workers`, including the training process. null: one per core, or up to 32 for
    environments that mostly wait (for a network, a simulator, a clock). Never more than `num_envs`. With `backend:
    envpool`, number of threads of EnvPool; null: one per core, and one for classic control."""

    max_episode_steps: int | None = Field(default=None, ge=1)
    """Truncates episodes after this many steps (their future value still counts). Default: the registered limit."""

    action_chunk: int = Field(default=1, ge=1, le=1024)
    """Actions per decision, executed one after the other without observations in between (Box actions, policies that
    act in chunks). A step is then a decision: its reward is the sum over the chunk, and `gamma` counts decisions."""

    normalize_observation: bool = False
    """Normalise observations by running statistics, stored in the checkpoint. Needed for continuous control, not for
    images or small classic tasks."""

    normalize_reward: bool = False
    """Scale rewards by the standard deviation of the discounted return. Reported returns are not scaled."""


def _register_environments() -> None:
    """Register our environments with Gymnasium, and let installed packages register theirs.

    Gymnasium itself reads no entry points since version 1.0. One of ours names a module, or a function to call.
    """
    for env_id, (entry_point, limit) in _REGISTERED.items():
        gymnasium.register(env_id, entry_point=entry_point, max_episode_steps=limit)
    for entry in entry_points(group=GROUP):
        try:
            register = entry.load()
            if callable(register):
                register()
        except Exception as error:  # noqa: BLE001 - a broken package must not take the others with it
            _log.warning("environments of %s cannot be registered (%s: %s)", entry.value, type(error).__name__, error)


_register_environments()


@dataclass(frozen=True, slots=True)
class KnownEnvironment:
    """One row of `palaestra envs`."""

    id: str
    origin: Literal["gymnasium", "compiled", "toy", "envpool"]
    installed: bool
    remedy: str = ""
    """How to install the missing package; empty if nothing is missing."""


def base_env_id(env_id: str) -> str:
    """The id of the registered environment that a compiled one copies; any other id unchanged."""
    return env_id.removeprefix("compiled/") if env_id in COMPILED else env_id


def raise_if_unknown(config: EnvConfig) -> None:
    """`UnknownEnvironment` if the backend has no environment of this id. Makes none."""
    if config.backend == "envpool":
        find_id(config.id)
    elif config.id not in COMPILED:
        EnvFactory(config.id).find_spec()


def with_time_limit(config: EnvConfig) -> EnvConfig:
    """The configuration, with `EPISODE_LIMIT` if neither it nor the registered environment has a time limit.

    A class or function that is not registered gets it in any case: an environment that ends its own episodes earlier
    never reaches it.
    """
    if config.backend == "envpool" or config.id in COMPILED or config.max_episode_steps is not None:
        return config
    spec = EnvFactory(config.id).find_spec()
    if spec is not None and spec.max_episode_steps is not None:
        return config
    return config.model_copy(update={"max_episode_steps": EPISODE_LIMIT})


def make_env(config: EnvConfig, *, first_index: int = 0) -> VectorEnv:
    """Make the environments of a configuration; `ConfigError` if that is impossible.

    `first_index`: number of the first one among the environments of several processes, for its seed.
    """
    if config.backend == "envpool":
        return _make_pool(config, first_index)
    if config.id in COMPILED:
        return _make_compiled(config, first_index)
    factory = EnvFactory(config.id, config.kwargs, config.max_episode_steps, config.action_chunk)
    spec = factory.find_spec()
    if config.action_chunk == 1:
        has_native = spec is not None and spec.vector_entry_point is not None
        prefers_native = has_native and config.num_envs >= MIN_NATIVE_ENVS and config.vectorization == "auto"
        is_only_native = spec is not None and spec.entry_point is None
        if config.vectorization == "native" or prefers_native or is_only_native:
            return _make_native(config, factory, has_native, first_index)
    properties = inspect_env(factory, name=config.id, patience_s=0.1)
    num_processes = min(config.num_workers or _choose_num_processes(properties), config.num_envs)
    is_slow = properties.step_seconds * config.num_envs > _MIN_WORKER_STEP_S
    if config.vectorization == "workers" or (config.vectorization == "auto" and is_slow and num_processes > 1):
        return WorkerEnv(factory, config.num_envs, num_processes, properties=properties, first_index=first_index)
    return InProcessEnv(factory, config.num_envs, first_index=first_index, mask_size=properties.mask_size)


def _choose_num_processes(properties: EnvProperties) -> int:
    """One per core; more for environments that wait, because a waiting process needs no core."""
    cores = usable_cores()
    if properties.busy_share >= _BUSY_SHARE:
        return cores
    return max(cores, min(_MAX_AUTO_WORKERS, math.ceil(cores / max(properties.busy_share, 1e-3))))


def as_vector_env(env: Any, *, num_envs: int = 8) -> VectorEnv:
    """Convert an id, a configuration or environment objects to a `VectorEnv`. `num_envs` applies to an id only."""
    if isinstance(env, str):
        return make_env(EnvConfig(id=env, num_envs=num_envs))
    if isinstance(env, EnvConfig):
        return make_env(env)
    if isinstance(env, gymnasium.vector.VectorEnv):
        return NativeEnv(env)
    if isinstance(env, gymnasium.Env):
        return InProcessEnv.from_envs([env])
    if isinstance(env, Sequence) and env and all(isinstance(item, gymnasium.Env) for item in env):
        return InProcessEnv.from_envs(env)
    if all(hasattr(env, name) for name in ("num_envs", "mask_size", "step", "snapshot", "restore")):
        return cast(VectorEnv, env)
    kinds = "an id, a gymnasium.Env or a list of them, a gymnasium.vector.VectorEnv or a palaestra VectorEnv"
    raise ConfigError("env", env, f"a {type(env).__name__} is not an environment", f"Give {kinds}")


def known_environments(backend: str = "gymnasium") -> list[KnownEnvironment]:
    """All environments of a backend and whether their dependency is installed; makes no environment."""
    if backend == "envpool":
        return [KnownEnvironment(name, "envpool", True) for name in pool_ids()]
    known = [KnownEnvironment(name, "compiled", True) for name in COMPILED]
    known += [KnownEnvironment(f"palaestra.env.toy:{name}", "toy", True) for name in _TOYS]
    for name in sorted(gymnasium.registry):
        spec = gymnasium.registry[name]
        missing = missing_dependency(spec.entry_point or spec.vector_entry_point)
        known.append(KnownEnvironment(name, "gymnasium", missing is None, missing[1] if missing else ""))
    return known


def _make_pool(config: EnvConfig, first_index: int) -> VectorEnv:
    if config.vectorization not in ("auto", "native"):
        reason = "EnvPool steps all copies itself"
        raise ConfigError("env.vectorization", config.vectorization, reason, "Leave it out, or leave env.backend out")
    if config.action_chunk > 1:
        reason = "EnvPool takes one action per step"
        raise ConfigError("env.action_chunk", config.action_chunk, reason, "Leave it out, or leave env.backend out")
    return EnvPoolEnv(
        config.id,
        config.num_envs,
        kwargs=config.kwargs,
        max_episode_steps=config.max_episode_steps,
        num_threads=config.num_workers,
        first_index=first_index,
    )


def _make_compiled(config: EnvConfig, first_index: int) -> VectorEnv:
    if config.action_chunk > 1:
        reason = f"{config.id} takes one discrete action per step"
        raise ConfigError("env.action_chunk", config.action_chunk, reason, "Leave env.action_chunk out")
    make = import_address(COMPILED[config.id], place="env.id")
    kwargs = _vector_kwargs(config)
    try:
        return cast(VectorEnv, make(num_envs=config.num_envs, first_index=first_index, **kwargs))
    except TypeError as error:
        raise ConfigError("env.kwargs", kwargs, f"{config.id} does not take these ({error})") from error


def _make_native(config: EnvConfig, factory: EnvFactory, has_native: bool, first_index: int) -> VectorEnv:
    if not has_native:
        reason = f"{config.id} has no vectorised form"
        raise ConfigError("env.vectorization", config.vectorization, reason, "Use 'auto', 'in_process' or 'workers'")
    kwargs = _vector_kwargs(config)
    try:
        with suppress_gymnasium_warnings():
            env = gymnasium.make_vec(config.id, config.num_envs, vectorization_mode="vector_entry_point", **kwargs)
    except TypeError as error:
        raise ConfigError("env.kwargs", kwargs, f"{config.id} does not take these ({error})") from error
    except (gymnasium_error.DependencyNotInstalled, ImportError) as error:
        raise factory.missing_dependency_error(error) from error
    return NativeEnv(env, first_index=first_index)


def _vector_kwargs(config: EnvConfig) -> dict[str, Any]:
    limit = {} if config.max_episode_steps is None else {"max_episode_steps": config.max_episode_steps}
    return {**config.kwargs, **limit}
