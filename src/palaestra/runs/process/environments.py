"""The environments that an interpreter has registered, and the parameters of their constructors.

Both are read by a probe in that interpreter. The answer is kept until packages are installed into the interpreter or
removed from it, and at most ten minutes, because an editable package can change without a trace; a refresh asks anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from palaestra.config import closest_names
from palaestra.errors import ConfigError, UnknownEnvironment
from palaestra.runs.catalogue import EnvironmentInfo
from palaestra.runs.process.interpreter import Interpreter, Probe, RegisteredEnvironment, probe
from palaestra.runs.process.parameter_schema import object_schema, parameter_properties
from palaestra.runs.runner import Machine
from palaestra.runs.wire import JsonObject

MAX_AGE_S = 600.0
_GROUPS = {
    "gymnasium.envs.classic_control": "Classic control",
    "gymnasium.envs.toy_text": "Toy text",
    "gymnasium.envs.box2d": "Box2D",
    "gymnasium.envs.mujoco": "MuJoCo",
    "gymnasium.envs.phys2d": "Compiled with JAX",
    "gymnasium.envs.tabular": "Compiled with JAX",
    "gymnasium_robotics": "Robotics",
    "minigrid": "MiniGrid",
    "ale_py": "Atari",
    "palaestra": "Palaestra",
}
_EXTRAS = {"Box2D": "box2d", "mujoco": "mujoco", "jax": "jax"}
"""Extras of Gymnasium that install a module."""
_VERSION = re.compile(r"(?P<name>.+)-v(?P<version>\d+)")
# What signatures do not say: choices, and ranges outside of which constructors fail or episodes make no sense.
_KNOWN_PARAMETERS: Mapping[str, Mapping[str, JsonObject]] = {
    "FrozenLake": {
        "map_name": {
            "type": ["string", "null"],
            "enum": ["4x4", "8x8", None],
            "description": "Size of the lake; null draws a random map.",
        },
        "success_rate": {"minimum": 0, "maximum": 1},
    },
    "LunarLander": {
        "gravity": {"exclusiveMinimum": -12, "exclusiveMaximum": 0},
        "wind_power": {"minimum": 0, "maximum": 20},
        "turbulence_power": {"minimum": 0, "maximum": 2},
    },
    "BipedalWalker": {"hardcore": {"description": "With ladders, stumps and pitfalls."}},
    "CarRacing": {"lap_complete_percent": {"exclusiveMinimum": 0, "maximum": 1}},
    "Pendulum": {"g": {"description": "Acceleration of gravity."}},
    "Blackjack": {
        "natural": {"description": "A natural (an ace and a ten) pays one and a half times."},
        "sab": {"description": "The rules of Sutton and Barto."},
    },
    "MountainCar": {"goal_velocity": {"description": "Velocity that the car must have at the goal.", "minimum": 0}},
}


def list_environments(
    interpreter: Interpreter, machine: Machine, *, register: tuple[str, ...] = (), refresh: bool = False
) -> list[EnvironmentInfo]:
    """All environments of an interpreter. `register`: modules to import first. `ConfigError` without Gymnasium."""
    probed = probe(interpreter, machine, registry=True, register=register, max_age_s=MAX_AGE_S, refresh=refresh)
    if probed.registry is None:
        raise _missing_gymnasium(interpreter, probed)
    newest = _newest_versions(row.env_id for row in probed.registry)
    return [_describe(row, interpreter, row.env_id in newest) for row in probed.registry]


def read_parameters(
    env_id: str, interpreter: Interpreter, machine: Machine, *, register: tuple[str, ...] = ()
) -> JsonObject:
    """JSON Schema of the arguments of an environment's constructor. `UnknownEnvironment` if there is none."""
    probed = probe(interpreter, machine, parameters_of=env_id, register=register, max_age_s=MAX_AGE_S)
    if probed.error:
        raise _missing_gymnasium(interpreter, probed)
    if probed.arguments is None:
        known = [info.env_id for info in list_environments(interpreter, machine, register=register)]
        close = closest_names(env_id, known)
        remedy = f"Nearest: {', '.join(close)}" if close else "GET /environments lists them"
        raise UnknownEnvironment("env_id", env_id, f"cannot be found ({probed.import_error[:200]})", remedy)
    name = env_id.rpartition("/")[2]
    facts = {
        key: fact for start, known in _KNOWN_PARAMETERS.items() if name.startswith(start) for key, fact in known.items()
    }
    return object_schema(parameter_properties(probed.arguments, facts))


def _describe(row: RegisteredEnvironment, interpreter: Interpreter, is_newest: bool) -> EnvironmentInfo:
    install = f"{interpreter.path} -m pip install 'gymnasium[{_EXTRAS.get(row.missing, row.missing)}]'"
    return EnvironmentInfo(
        env_id=row.env_id,
        group=find_group(row.entry_point),
        installed=not row.missing,
        remedy=install if row.missing else "",
        max_episode_steps=row.max_episode_steps,
        newest=is_newest,
    )


def find_group(entry_point: str) -> str:
    """The group of an environment: a part of Gymnasium, or the package that registers it."""
    known = next((group for start, group in _GROUPS.items() if entry_point.startswith(start)), "")
    package = entry_point.partition(":")[0].partition(".")[0]
    return known or package.replace("_", " ").capitalize() or "Other"


def _newest_versions(ids: Iterable[str]) -> set[str]:
    """The ids of which there is no later version."""
    newest: dict[str, tuple[int, str]] = {}
    for env_id in ids:
        match = _VERSION.fullmatch(env_id)
        name, version = (match["name"], int(match["version"])) if match else (env_id, 0)
        newest[name] = max(newest.get(name, (-1, "")), (version, env_id))
    return {env_id for _, env_id in newest.values()}


def _missing_gymnasium(interpreter: Interpreter, probed: Probe) -> ConfigError:
    if probed.error:
        reason = f"{interpreter.path} {probed.error}"
        return ConfigError("python", interpreter.path, reason, "Name a working interpreter with --python")
    reason = f"has no Gymnasium ({probed.import_error})"
    return ConfigError("python", interpreter.path, reason, f"{interpreter.path} -m pip install gymnasium")
