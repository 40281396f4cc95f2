"""Looks around in an interpreter before anything is launched in it, and prints one JSON object.

Versions of packages, whether CUDA is there, whether an environment can be made and what its spaces are, which keyword
arguments a class takes. Run by path with the interpreter in question; imports nothing of ours. Python 3.8 or later.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import math
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

SAME = {
    "opencv-python": ("opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless"),
    "pygame": ("pygame-ce",),
}
"""Distributions that bring the same module under another name."""
MANY = 64
"""Bounds of a space with more numbers than this are told by their range."""


def main(wanted: dict[str, Any]) -> dict[str, Any]:
    """Answer what was asked: `packages`, `env_id` (after importing `register`; drawn when `render`), `cuda`,
    `signature_of` (an address), `wrappers` of Gymnasium.
    """
    found: dict[str, Any] = {
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "executable": sys.executable,
        "packages": {name: version_of(name) for name in wanted.get("packages", ())},
    }
    if wanted.get("cuda"):
        found["cuda"] = cuda()
    if wanted.get("env_id"):
        found["env"] = environment(wanted["env_id"], wanted.get("register", ()), wanted.get("render", False))
    if wanted.get("wrappers"):
        found["missing_wrappers"] = missing_wrappers(wanted["wrappers"])
    if wanted.get("signature_of"):
        found["arguments"] = arguments_of(wanted["signature_of"])
    return found


def version_of(name: str) -> str | None:
    """Of an installed distribution, or of one that is the same under another name; None when there is none."""
    for known in (name, *SAME.get(name, ())):
        try:
            return metadata.version(known)
        except metadata.PackageNotFoundError:
            continue
    return None


def cuda() -> bool:
    """Whether torch could use a GPU."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def missing_wrappers(names: list[str]) -> list[str]:
    """Those of the names that `gymnasium.wrappers` does not have."""
    try:
        wrappers = importlib.import_module("gymnasium.wrappers")
    except ImportError:
        return []
    return [name for name in names if not hasattr(wrappers, name)]


def environment(env_id: str, register: Sequence[str] = (), render: bool = False) -> dict[str, Any]:
    """Whether an environment can be made, and what it looks like; else why not and what is nearest."""
    try:
        gymnasium = importlib.import_module("gymnasium")
    except ImportError as error:
        return {"made": False, "reason": str(error), "known": []}
    for name in register:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    try:
        env = gymnasium.make(env_id, render_mode="rgb_array") if render else gymnasium.make(env_id)
        if render:
            env.reset()
            env.render()
    except Exception as error:  # noqa: BLE001 - whatever an environment does on being made is its answer
        return {"made": False, "reason": f"{type(error).__name__}: {error}", "known": sorted(gymnasium.registry)}
    try:
        return {"made": True, "signature": signature(env, env_id)}
    finally:
        env.close()


def signature(env: Any, env_id: str) -> dict[str, Any]:
    """What a policy must fit: identity and spaces of an environment, as JSON."""
    spec = getattr(env, "spec", None)
    return {
        "env_id": env_id,
        "entry_point": str(getattr(spec, "entry_point", "") or ""),
        "max_episode_steps": getattr(spec, "max_episode_steps", None),
        "observation_space": space_json(env.observation_space),
        "action_space": space_json(env.action_space),
    }


def space_json(space: Any) -> dict[str, Any]:
    """A Gymnasium space as plain JSON; equal spaces give equal JSON."""
    kind = type(space).__name__
    if kind == "Box":
        bounds = {"low": _bound(space.low), "high": _bound(space.high)}
        return {"type": kind, "shape": list(space.shape), "dtype": str(space.dtype), **bounds}
    if kind == "Discrete":
        return {"type": kind, "n": int(space.n), "start": int(getattr(space, "start", 0))}
    if kind == "MultiDiscrete":
        return {"type": kind, "nvec": space.nvec.tolist()}
    if kind == "MultiBinary":
        return {"type": kind, "shape": list(space.shape)}
    if kind == "Dict":
        return {"type": kind, "spaces": {str(key): space_json(inner) for key, inner in space.spaces.items()}}
    if kind == "Tuple":
        return {"type": kind, "spaces": [space_json(inner) for inner in space.spaces]}
    return {"type": kind, "repr": str(space)}


def _bound(numbers: Any) -> Any:
    flat = [_number(value) for value in numbers.reshape(-1).tolist()]
    if len(set(flat)) == 1:
        return flat[0]
    return flat if len(flat) <= MANY else [_number(float(numbers.min())), _number(float(numbers.max()))]


def _number(value: float) -> Any:
    return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")


def arguments_of(address: str) -> dict[str, Any]:
    """The keyword arguments of what `module:Class` names, with defaults where JSON can hold them."""
    module, _, name = address.partition(":")
    try:
        target = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        return {"found": False, "reason": str(error)}
    taken = {}
    for parameter in inspect.signature(target).parameters.values():
        default = parameter.default
        plain = default is None or isinstance(default, (bool, int, float, str))
        annotation = parameter.annotation
        taken[parameter.name] = {
            "default": default if plain else None,
            "required": default is inspect.Parameter.empty,
            "kind": annotation if isinstance(annotation, str) else inspect.formatannotation(annotation),
        }
    return {"found": True, "takes": taken}


if __name__ == "__main__":
    # Environments and libraries print banners; the answer must be alone on stdout.
    answer, sys.stdout = sys.stdout, sys.stderr
    json.dump(main(json.loads(sys.argv[1])), answer)
    answer.flush()
    # Some simulators hang in their own clean-up.
    os._exit(0)
