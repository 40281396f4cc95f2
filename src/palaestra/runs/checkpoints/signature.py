"""What a policy must find in an environment to act there: its identity and spaces, in one form whoever wrote them.

The probe of a runner, `train --check` and our policy files each describe spaces as JSON with small differences; two
descriptions of one space are equal after `signature_of`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["compatible", "signature_of"]

_MANY = 64
"""Bounds of a space with more numbers than this are told by their range, as the probe does."""

_VERSION = re.compile(r"(?P<name>.+?)-v(?P<version>\d+)")


def signature_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """An environment's signature from any description of it; keys that it does not have are left out."""
    kept = {key: found[key] for key in ("env_id", "entry_point", "max_episode_steps") if found.get(key)}
    for key in ("observation_space", "action_space"):
        if isinstance(found.get(key), Mapping):
            kept[key] = _space(found[key])
    return kept


def compatible(policy: Mapping[str, Any], environment: Mapping[str, Any]) -> list[str]:
    """Why a policy of the one signature cannot act in the other; empty when it can. What nobody knows is no reason."""
    mine, theirs = signature_of(policy), signature_of(environment)
    reasons = _identity(mine, theirs)
    for key, name in (("observation_space", "observations"), ("action_space", "actions")):
        if key in mine and key in theirs and mine[key] != theirs[key]:
            reasons.append(f"its {name} are {_shown(mine[key])}, there they are {_shown(theirs[key])}")
    return reasons


def _identity(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    a, b = str(mine.get("env_id", "")), str(theirs.get("env_id", ""))
    if not a or not b or a == b:
        return []
    first, second = _VERSION.fullmatch(a), _VERSION.fullmatch(b)
    if first and second and first["name"] == second["name"]:
        return [f"it was trained in version {first['version']} of {first['name']}, this is version {second['version']}"]
    return [f"it was trained in {a}, this is {b}"]


def _space(space: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(space.get("type") or space.get("kind") or "")
    if kind == "Box":
        bounds = {side: _bound(space.get(side)) for side in ("low", "high")}
        return {"type": kind, "shape": list(space.get("shape", ())), "dtype": str(space.get("dtype", "")), **bounds}
    if kind == "Discrete":
        return {"type": kind, "n": space.get("n"), "start": space.get("start", 0)}
    if kind == "MultiDiscrete":
        return {"type": kind, "nvec": space.get("nvec")}
    if kind == "MultiBinary":
        return {"type": kind, "shape": list(space.get("shape", ()))}
    inner = space.get("spaces")
    if isinstance(inner, Mapping):
        return {"type": kind, "spaces": {str(key): _space(part) for key, part in sorted(inner.items())}}
    if isinstance(inner, list):
        return {"type": kind, "spaces": [_space(part) for part in inner]}
    return {"type": kind, "repr": space.get("repr")}


def _bound(value: Any) -> Any:
    numbers = [_number(number) for number in _flat(value)]
    if not numbers:
        return None
    if len(set(numbers)) == 1:
        return _plain(numbers[0])
    if len(numbers) > _MANY:
        return [_plain(min(numbers)), _plain(max(numbers))]
    return [_plain(number) for number in numbers]


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [number for part in value for number in _flat(part)]
    return [] if value is None else [value]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, str) else value


def _plain(value: float) -> Any:
    return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")


def _shown(space: Mapping[str, Any]) -> str:
    kind = space["type"]
    if kind == "Box":
        return (
            f"{'×'.join(str(size) for size in space['shape'])} {space['dtype']} from {space['low']} to {space['high']}"
        )
    if kind == "Discrete":
        return f"{space['n']} choices"
    told = space.get("nvec") or space.get("shape") or space.get("repr")
    if isinstance(space.get("spaces"), dict):
        told = ", ".join(f"{name}: {_shown(part)}" for name, part in space["spaces"].items())
    return f"{kind} ({told})"
