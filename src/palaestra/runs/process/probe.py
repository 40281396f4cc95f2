"""Probes an interpreter before a trainer is launched in it, and prints one JSON object. A program.

Reports package versions, whether CUDA is available, whether an environment can be created and what its spaces are, and
the keyword arguments of a class. Run by path with the interpreter to probe; imports nothing of ours. Python 3.8+.
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

EQUIVALENT = {
    "opencv-python": ("opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless"),
    "pygame": ("pygame-ce",),
}
"""Other distributions that provide the same module."""
MAX_BOUNDS = 64
"""The bounds of a larger space are reduced to their minimum and maximum."""


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request with `packages`, `env_id` (after importing `register`; rendered if `render`), `cuda`,
    `signature_of` (an address) and `wrappers` of Gymnasium.
    """
    answer: dict[str, Any] = {
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "packages": {name: version_of(name) for name in request.get("packages", ())},
    }
    if request.get("cuda"):
        answer["cuda"] = cuda()
    if request.get("env_id"):
        answer["env"] = environment(request["env_id"], request.get("register", ()), request.get("render", False))
    if request.get("wrappers"):
        answer["missing_wrappers"] = missing_wrappers(request["wrappers"])
    if request.get("signature_of"):
        answer["arguments"] = arguments_of(request["signature_of"])
    return answer


def version_of(name: str) -> str | None:
    """Version of an installed distribution or an equivalent one; None if not installed."""
    for known in (name, *EQUIVALENT.get(name, ())):
        try:
            return metadata.version(known)
        except metadata.PackageNotFoundError:
            continue
    return None


def cuda() -> bool:
    """Whether torch can use a GPU."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def missing_wrappers(names: list[str]) -> list[str]:
    """The names that `gymnasium.wrappers` does not have."""
    try:
        wrappers = importlib.import_module("gymnasium.wrappers")
    except ImportError:
        return []
    return [name for name in names if not hasattr(wrappers, name)]


def environment(env_id: str, register: Sequence[str] = (), render: bool = False) -> dict[str, Any]:
    """Whether an environment can be created, with its signature; else why not, with all known ids."""
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
    except Exception as error:  # noqa: BLE001 - any failure is the answer
        return {"made": False, "reason": f"{type(error).__name__}: {error}", "known": sorted(gymnasium.registry)}
    try:
        return {"made": True, "signature": signature(env, env_id)}
    finally:
        env.close()


def signature(env: Any, env_id: str) -> dict[str, Any]:
    """Identity and spaces of an environment as JSON; a policy must match it."""
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
        bounds = {"low": _bounds_json(space.low), "high": _bounds_json(space.high)}
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


def _bounds_json(numbers: Any) -> Any:
    flat = [_number(value) for value in numbers.reshape(-1).tolist()]
    if len(set(flat)) == 1:
        return flat[0]
    return flat if len(flat) <= MAX_BOUNDS else [_number(float(numbers.min())), _number(float(numbers.max()))]


def _number(value: float) -> Any:
    return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")


def arguments_of(address: str) -> dict[str, Any]:
    """The keyword arguments of `module:Class`, with defaults that JSON can represent."""
    module, _, name = address.partition(":")
    try:
        target = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        return {"found": False, "reason": str(error)}
    arguments = {}
    for parameter in inspect.signature(target).parameters.values():
        default = parameter.default
        plain = default is None or isinstance(default, (bool, int, float, str))
        annotation = parameter.annotation
        arguments[parameter.name] = {
            "default": default if plain else None,
            "required": default is inspect.Parameter.empty,
            "kind": annotation if isinstance(annotation, str) else inspect.formatannotation(annotation),
        }
    return {"found": True, "takes": arguments}


if __name__ == "__main__":
    # Environments and libraries print banners; keep stdout for the answer.
    answer, sys.stdout = sys.stdout, sys.stderr
    json.dump(main(json.loads(sys.argv[1])), answer)
    answer.flush()
    # Some simulators hang while exiting.
    os._exit(0)
