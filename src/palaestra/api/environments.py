"""Environments that are functions or classes of a notebook, which a configuration names like any other.

A class or function at the top level of a module has an address (`my_package.tasks:Maze`, or `__main__:Maze` in a
notebook), which also works after the notebook was restarted and has defined it again. A lambda or an inner function has
none. It is kept in this module for as long as the Python process lives.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from palaestra.errors import ConfigError, UnknownEnvironment

_factories: dict[str, Callable[..., Any]] = {}
"""The functions without an address, by the name that a configuration has for each."""


def __getattr__(name: str) -> Any:
    """The factory that a configuration names; looked up like an attribute of any module."""
    if name in _factories:
        return _factories[name]
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    reason = "it was a function of another Python process, which has no address"
    remedy = "Give the function again: palaestra.load(…, env=function). A class in a module keeps its address"
    raise UnknownEnvironment("env.id", f"{__name__}:{name}", reason, remedy)


def environment_section(factory: Any) -> dict[str, Any]:
    """The section `env` of a configuration for an id, or for a class or function that makes one environment."""
    import gymnasium

    if isinstance(factory, str):
        return {"id": factory}
    if isinstance(factory, gymnasium.Env):
        remedy = "Give a function that makes one, because training steps several copies: lambda: MyEnv(…)"
        raise ConfigError("env", type(factory).__name__, "is an environment object", remedy)
    if not callable(factory):
        remedy = "Give an id, a configuration, or a class or function that makes an environment"
        raise ConfigError("env", factory, f"has type {type(factory).__name__}, which makes no environment", remedy)
    module, name = getattr(factory, "__module__", "") or "", getattr(factory, "__qualname__", "")
    has_address = getattr(sys.modules.get(module), name, None) is factory
    section = {"id": f"{module}:{name}" if has_address else f"{__name__}:{_keep(factory, name)}"}
    if not has_address or module == "__main__":
        # Worker processes could not import it.
        section["vectorization"] = "in_process"
    return section


def _keep(factory: Callable[..., Any], name: str) -> str:
    """The name of a factory in this module; each function gets its own."""
    for known, kept in _factories.items():
        if kept is factory:
            return known
    stem = re.sub(r"\W+", "_", name.rpartition(".")[2]).strip("_") or type(factory).__name__
    known = f"{stem}_{len(_factories) + 1}"
    _factories[known] = factory
    return known
