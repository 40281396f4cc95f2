"""Signatures of environments: the id and the spaces that a policy needs.

The probe of a runner, `train --check` and policy files describe spaces as JSON with small differences. After
`normalize_signature`, two descriptions of the same space are equal.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any

from palaestra.config import closest_names
from palaestra.errors import ConfigError, UnknownEnvironment
from palaestra.runs.process.environments import read_parameters
from palaestra.runs.process.interpreter import ProbedEnvironment, choose_python, probe
from palaestra.runs.runner import Machine
from palaestra.runs.spec import RunSpec
from palaestra.runs.wire import JsonObject

_MAX_BOUNDS = 64
"""Bounds of larger spaces are stored as a range, as the probe does."""

_DEFAULT = "the default"
"""Shown in the place of a default that is not known."""

_VERSION = re.compile(r"(?P<name>.+?)-v(?P<version>\d+)")


def normalize_signature(description: JsonObject) -> JsonObject:
    """Build a signature from any description of an environment; missing keys are left out."""
    signature = {
        key: description[key] for key in ("env_id", "entry_point", "max_episode_steps") if description.get(key)
    }
    for key in ("observation_space", "action_space"):
        if isinstance(description.get(key), Mapping):
            signature[key] = _normalize_space(description[key])
    return signature


def find_incompatibilities(policy: JsonObject, environment: JsonObject) -> list[str]:
    """Return why a policy cannot act in an environment; empty when it can. Missing information is no reason."""
    trained, target = normalize_signature(policy), normalize_signature(environment)
    reasons = _compare_ids(trained, target)
    for key, name in (("observation_space", "observations"), ("action_space", "actions")):
        if key in trained and key in target and not _is_same_space(trained[key], target[key]):
            reasons.append(
                f"its {name} are {_describe_space(trained[key])}, there they are {_describe_space(target[key])}"
            )
    return reasons


def find_dataset_mismatch(offline_dataset: JsonObject, env_id: str, env_kwargs: Mapping[str, object]) -> str:
    """Why a policy that learned from a dataset does not belong into an environment; empty when it does.

    `env_kwargs` are arguments of the environment's constructor.
    """
    recorded_in, here = str(offline_dataset.get("env_id") or ""), env_id
    if not recorded_in or not here:
        return ""
    origin = f"it learned from {offline_dataset.get('dataset_id')}, which was recorded in {recorded_in}"
    # A compiled environment is a copy of the registered one.
    if recorded_in.removeprefix("compiled/") != here.removeprefix("compiled/"):
        return f"{origin}, this is {here}"
    recorded = offline_dataset.get("env_kwargs")
    # Checkpoints of earlier versions do not name the arguments.
    differences = _compare_kwargs(recorded, env_kwargs, here) if isinstance(recorded, Mapping) else {}
    if not differences:
        return ""
    there, now = (", ".join(f"{key} = {pair[side]}" for key, pair in differences.items()) for side in (0, 1))
    return f"{origin} with {there}, this is {here} with {now}"


def _compare_kwargs(
    recorded: Mapping[str, object], current: Mapping[str, object], env_id: str
) -> dict[str, tuple[str, str]]:
    """The arguments that differ, with both values; one that is left out has its default."""
    names = sorted((recorded.keys() | current.keys()) - {"render_mode"})
    if all(name in recorded and name in current and recorded[name] == current[name] for name in names):
        return {}
    defaults = _read_defaults(env_id.removeprefix("compiled/"))
    pairs = {name: [values.get(name, defaults.get(name, _DEFAULT)) for values in (recorded, current)] for name in names}
    return {name: (str(first), str(second)) for name, (first, second) in pairs.items() if first != second}


def _read_defaults(env_id: str) -> JsonObject:
    """The known defaults of an environment's arguments; a separate process reads them."""
    machine = Machine(environment=dict(os.environ), free_disk_bytes=0)
    try:
        schema = read_parameters(env_id, choose_python(RunSpec()), machine, register=("palaestra.env.make",))
    except ConfigError:
        return {}
    return {name: facts["default"] for name, facts in schema["properties"].items() if "default" in facts}


def probe_environment(env_id: str, place: str, *, required: bool) -> JsonObject:
    """Create an environment in a separate process and return its signature.

    When it cannot be created, raise `UnknownEnvironment` if `required`, else return the id alone.
    """
    machine = Machine(environment=dict(os.environ), free_disk_bytes=0)
    result = probe(choose_python(RunSpec()), machine, env_id=env_id).env or ProbedEnvironment(made=False)
    if result.made:
        return result.signature
    if not required:
        return {"env_id": env_id}
    close = closest_names(env_id, result.known)
    remedy = f"Nearest: {', '.join(close)}" if close else "palaestra envs lists the available ones"
    raise UnknownEnvironment(place, env_id, f"cannot be created here ({result.reason[:200]})", remedy)


def _compare_ids(trained: JsonObject, target: JsonObject) -> list[str]:
    a, b = str(trained.get("env_id", "")), str(target.get("env_id", ""))
    if not a or not b or a == b:
        return []
    first, second = _VERSION.fullmatch(a), _VERSION.fullmatch(b)
    if first and second and first["name"] == second["name"]:
        return [f"it was trained in version {first['version']} of {first['name']}, this is version {second['version']}"]
    return [f"it was trained in {a}, this is {b}"]


def _is_same_space(first: JsonObject, second: JsonObject) -> bool:
    """Compare normalised spaces; bounds that one of them leaves out are not compared."""
    if first["type"] != second["type"]:
        return False
    if first["type"] == "Box":
        unknown = {side for side in ("low", "high") if first[side] is None or second[side] is None}
        return all(first[key] == second[key] for key in first.keys() - unknown)
    parts, others = first.get("spaces"), second.get("spaces")
    if isinstance(parts, dict) and isinstance(others, dict):
        return parts.keys() == others.keys() and all(_is_same_space(parts[key], others[key]) for key in parts)
    if isinstance(parts, list) and isinstance(others, list):
        return len(parts) == len(others) and all(map(_is_same_space, parts, others))
    return first == second


def _normalize_space(space: JsonObject) -> JsonObject:
    kind = str(space.get("type") or space.get("kind") or "")
    if kind == "Box":
        bounds = {side: _normalize_bound(space.get(side)) for side in ("low", "high")}
        return {"type": kind, "shape": list(space.get("shape", ())), "dtype": str(space.get("dtype", "")), **bounds}
    if kind == "Discrete":
        return {"type": kind, "n": space.get("n"), "start": space.get("start", 0)}
    if kind == "MultiDiscrete":
        return {"type": kind, "nvec": space.get("nvec")}
    if kind == "MultiBinary":
        return {"type": kind, "shape": list(space.get("shape", ()))}
    inner = space.get("spaces")
    if isinstance(inner, Mapping):
        return {"type": kind, "spaces": {str(key): _normalize_space(part) for key, part in sorted(inner.items())}}
    if isinstance(inner, list):
        return {"type": kind, "spaces": [_normalize_space(part) for part in inner]}
    return {"type": kind, "repr": space.get("repr")}


def _normalize_bound(value: object) -> float | str | list[float | str] | None:
    numbers = [float(number) if isinstance(number, str) else number for number in _flatten(value)]
    if not numbers:
        return None
    if len(set(numbers)) == 1:
        return _to_json(numbers[0])
    if len(numbers) > _MAX_BOUNDS:
        return [_to_json(min(numbers)), _to_json(max(numbers))]
    return [_to_json(number) for number in numbers]


def _flatten(value: object) -> list[Any]:
    if isinstance(value, list | tuple):
        return [number for part in value for number in _flatten(part)]
    return [] if value is None else [value]


def _to_json(value: float) -> float | str:
    return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")


def _describe_space(space: JsonObject) -> str:
    kind = space["type"]
    if kind == "Box":
        shape = "×".join(str(size) for size in space["shape"])
        bounds = "" if space["low"] is None else f" from {space['low']} to {space['high']}"
        return f"{shape} {space['dtype']}{bounds}"
    if kind == "Discrete":
        return f"{space['n']} choices"
    details = space.get("nvec") or space.get("shape") or space.get("repr")
    if isinstance(space.get("spaces"), dict):
        details = ", ".join(f"{name}: {_describe_space(part)}" for name, part in space["spaces"].items())
    return f"{kind} ({details})"
