"""Probes an interpreter before a trainer is launched in it, and prints one JSON object. A program.

Reports package versions, whether CUDA is available, whether an environment can be created and what its spaces are, all
registered environments, and the keyword arguments of a class or an environment. Run by path with the interpreter to
probe; imports nothing of ours. Python 3.8+.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

EQUIVALENT = {
    "opencv-python": ("opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless"),
    "pygame": ("pygame-ce",),
}
"""Other distributions that provide the same module."""
DEPENDENCIES = {
    "gymnasium.envs.box2d": "Box2D",
    "gymnasium.envs.mujoco": "mujoco",
    "gymnasium.envs.phys2d": "jax",
    "gymnasium.envs.tabular": "jax",
    "palaestra.env.table.mujoco": "mujoco",
}
"""Modules that environments import when they are made, by the beginning of their entry points."""
MAX_DESCRIPTION = 250
MAX_BOUNDS = 64
"""The bounds of a larger space are reduced to their minimum and maximum."""


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request with `packages`, `env_id` (made with `env_kwargs` after importing `register`; rendered if
    `render`), `cuda`, `signature_of` (an address), `wrappers` of Gymnasium, `registry` and `parameters_of`.
    """
    answer: dict[str, Any] = {
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "packages": {name: version_of(name) for name in request.get("packages", ())},
    }
    if request.get("cuda"):
        answer["cuda"] = cuda()
    if request.get("env_id"):
        options = request.get("register", ()), request.get("render", False), request.get("env_kwargs") or {}
        answer["env"] = environment(request["env_id"], *options)
    if request.get("wrappers"):
        answer["missing_wrappers"] = missing_wrappers(request["wrappers"])
    if request.get("signature_of"):
        answer["arguments"] = arguments_of(request["signature_of"])
    if request.get("registry"):
        answer["registry"] = list_registered(request.get("register", ()))
    if request.get("parameters_of"):
        answer["arguments"] = parameters_of(request["parameters_of"], request.get("register", ()))
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


def environment(
    env_id: str, register: Sequence[str] = (), render: bool = False, env_kwargs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Whether an environment can be created, with its signature; else why not, with all known ids."""
    try:
        gymnasium = import_registering(register)
    except ImportError as error:
        return {"made": False, "reason": str(error), "known": []}
    try:
        env = gymnasium.make(env_id, **(env_kwargs or {}), **({"render_mode": "rgb_array"} if render else {}))
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
    return {"found": True, "takes": describe_arguments(target)}


def describe_arguments(target: Any) -> dict[str, Any]:
    """Name, default, annotation and description of the arguments of a class or function."""
    descriptions = read_descriptions(inspect.getdoc(target) or "")
    arguments = {}
    for parameter in inspect.signature(target).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        default, annotation = parameter.default, parameter.annotation
        required = default is inspect.Parameter.empty
        unannotated = "" if required or default is None else type(default).__name__
        text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        arguments[parameter.name] = {
            "default": default if is_plain(default) else None,
            "required": required,
            "opaque": not required and not is_plain(default),
            "kind": unannotated if annotation is inspect.Parameter.empty else text,
            "description": descriptions.get(parameter.name, ""),
        }
    return arguments


def is_plain(value: Any) -> bool:
    """Whether JSON can represent a value."""
    if isinstance(value, (list, tuple)):
        return all(is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str))


def read_descriptions(text: str) -> dict[str, str]:
    """What a docstring says about arguments: as `:param name: …`, or in Gymnasium's lists and tables."""
    descriptions = dict(re.findall(r":param (\w+): (.+?)(?=\n\s*:|\n\s*\n|\Z)", text, re.DOTALL))
    for name, words in re.findall(r"^\| `(\w+)`\s*\|.*\|([^|\n]+)\|\s*$", text, re.MULTILINE):
        descriptions.setdefault(name, words)
    for name, words in re.findall(
        r"^\s*(?:\* )?`(\w+)(?:=[^`]*)?`:?\s+(.+?)(?=\n\s*\n|\n\s*\* |\Z)", text, re.M | re.S
    ):
        descriptions.setdefault(name, words)
    return {name: shorten(" ".join(words.split())) for name, words in descriptions.items()}


def shorten(text: str) -> str:
    """The first sentences of a text, up to `MAX_DESCRIPTION` characters."""
    text = text[:1].upper() + text[1:]
    if len(text) <= MAX_DESCRIPTION:
        return text
    beginning = text[:MAX_DESCRIPTION]
    sentences, end, _ = beginning.rpartition(". ")
    return sentences + "." if end else beginning.rpartition(" ")[0] + " …"


def list_registered(register: Sequence[str]) -> dict[str, Any]:
    """All registered environments that can exist here, and the module that each one lacks."""
    try:
        gymnasium = import_registering(register)
    except ImportError as error:
        return {"found": False, "reason": str(error)}
    rows = []
    for env_id, spec in sorted(gymnasium.registry.items()):
        entry_point = spec.entry_point or getattr(spec, "vector_entry_point", None)
        address = entry_point if isinstance(entry_point, str) else getattr(entry_point, "__module__", "")
        if getattr(entry_point, "__name__", "").startswith("_raise"):
            continue  # Gymnasium registers the ids of removed environments with a function that explains it.
        needed = next((module for start, module in DEPENDENCIES.items() if address.startswith(start)), "")
        rows.append(
            {
                "env_id": env_id,
                "entry_point": address,
                "max_episode_steps": spec.max_episode_steps,
                "missing": needed if needed and importlib.util.find_spec(needed) is None else "",
            }
        )
    return {"found": True, "environments": rows}


def parameters_of(env_id: str, register: Sequence[str]) -> dict[str, Any]:
    """The arguments of the constructor of an environment, given by id or by `module:factory`."""
    try:
        gymnasium = import_registering(register)
        module, colon, name = env_id.partition(":")
        factory = getattr(importlib.import_module(module), name, None) if colon else None
        kwargs = {}
        if factory is None:
            spec = gymnasium.spec(name if colon else env_id)
            kwargs = spec.kwargs
            entry_point = spec.entry_point or spec.vector_entry_point
            factory = entry_point if callable(entry_point) else load_entry_point(entry_point)
        arguments = describe_arguments(factory)
    except Exception as error:  # noqa: BLE001 - any failure is the answer
        return {"found": False, "reason": f"{type(error).__name__}: {error}"}
    arguments.pop("render_mode", None)
    for name, value in kwargs.items():
        if name in arguments and is_plain(value):
            arguments[name].update(default=value, required=False, opaque=False)
    return {"found": True, "takes": arguments}


def load_entry_point(address: str) -> Any:
    """The class or function at `module:name`."""
    module, _, name = address.partition(":")
    return getattr(importlib.import_module(module), name)


def import_registering(register: Sequence[str]) -> Any:
    """Gymnasium, after modules that register environments."""
    gymnasium = importlib.import_module("gymnasium")
    for name in register:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return gymnasium


if __name__ == "__main__":
    # Environments and libraries print banners; keep stdout for the answer.
    answer, sys.stdout = sys.stdout, sys.stderr
    json.dump(main(json.loads(sys.argv[1])), answer)
    answer.flush()
    # Some simulators hang while exiting.
    os._exit(0)
