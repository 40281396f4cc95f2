"""The optional dependencies: which extra installs which modules, and errors that say how to install them."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from palaestra.errors import ConfigError

QT_LIBRARIES = "apt-get install libegl1 libgl1 libxkbcommon0 libfontconfig1 libdbus-1-3 fonts-dejavu-core"
"""What PySide6 needs of a Debian system."""
_MAX_NAMES = 3


@dataclass(frozen=True)
class Extra:
    """An extra of pyproject.toml."""

    purpose: str
    modules: tuple[str, ...]
    """Modules that the code imports from it, by the name in `import`."""


SERVER = ("fastapi", "uvicorn", "httptools")
"""Modules without which no HTTP server starts."""
GATEWAY = ("aiohttp", *SERVER)
"""Modules without which the gateway does not start."""
UI_AGENTS = ("transformers", "peft", "PIL", "aiohttp")
"""Modules without which no UI agent is trained or evaluated; its sessions may be elsewhere."""
_SERVICE = (*SERVER, "uvloop", "websockets", "PIL")
EXTRAS: Mapping[str, Extra] = {
    "serve": Extra("the run service, sweeps and the web page", _SERVICE),
    "studio": Extra("the desktop studio", ("PySide6", "pyqtgraph", *_SERVICE)),
    "ui": Extra("UI sessions in browsers, the gateway, MiniWoB tasks", ("aiohttp", "miniwob", *SERVER, "PIL")),
    "vlm": Extra("vision-language models", ("transformers", "peft", "PIL")),
    "box2d": Extra("the environments LunarLander and BipedalWalker", ("Box2D",)),
    "mujoco": Extra("the environments of MuJoCo", ("mujoco",)),
    "envpool": Extra("the environments of EnvPool", ("envpool",)),
    "offline": Extra("datasets to learn from", ("h5py", "minari")),
    "sweeps": Extra("sweeps with Optuna", ("optuna",)),
    "tensorboard": Extra("TensorBoard files", ("tensorboard",)),
    "wandb": Extra("tracking with W&B", ("wandb",)),
    "video": Extra("video clips", ("imageio_ffmpeg",)),
    "ray": Extra("actors and runs on a Ray cluster", ("ray",)),
    "k8s": Extra("UI sessions as Kubernetes pods", ("kubernetes",)),
    "lerobot": Extra("policies of LeRobot", ("lerobot",)),
}


def is_installed(module: str) -> bool:
    """Whether a module can be found; imports nothing."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a broken parent package, or a module without a spec
        return False
    # A directory without code, such as the `wandb` that W&B writes into the current directory, has no origin.
    return spec is not None and spec.origin is not None


def missing_modules(extra: str) -> list[str]:
    """The modules of an extra that are not installed."""
    return [name for name in EXTRAS[extra].modules if not is_installed(name)]


def install_command(*extras: str) -> str:
    """The command that installs extras."""
    return f"pip install 'palaestra[{','.join(extras)}]'"


def find_extra(module: str) -> str | None:
    """The first extra that installs a module, such as `ui` for `aiohttp.web`; None if no extra does."""
    package = module.partition(".")[0]
    return next((name for name, extra in EXTRAS.items() if package in extra.modules), None)


def require_extras(place: str, *extras: str, only: Collection[str] = ()) -> None:
    """Raise `ConfigError` with the command to run if modules of the extras are missing.

    `only` limits the check to these modules: a container image may hold less than an extra installs.
    """
    missing = {
        extra: names
        for extra in extras
        if (names := [name for name in missing_modules(extra) if not only or name in only])
    }
    if missing:
        modules = dict.fromkeys(name for names in missing.values() for name in names)
        raise missing_modules_error(place, list(modules), list(missing))


def missing_modules_error(place: str, modules: Sequence[str], extras: Sequence[str]) -> ConfigError:
    """The error about missing modules that extras install."""
    more = len(modules) - _MAX_NAMES
    value = ", ".join(modules[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
    reason = "is not installed" if len(modules) == 1 else "are not installed"
    return ConfigError(place, value, reason, f"Run: {install_command(*extras)}")
