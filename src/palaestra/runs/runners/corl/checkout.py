"""The files of a CORL checkout: its directory, its scripts and their configurations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from palaestra.config import closest_names
from palaestra.errors import ConfigError
from palaestra.runs.runners.script_arguments import leaves_directory
from palaestra.runs.spec import RunSpec

CHECKOUT = "PALAESTRA_CORL"
CLONE = "git clone https://github.com/corl-team/CORL, then export PALAESTRA_CORL=$PWD/CORL or give checkout=DIR"
_FOLDERS = {"offline": "", "finetune": "finetune/"}
"""Folders of `algorithms`, and what the names of their scripts begin with."""


def find_checkout(spec: RunSpec, environment: Mapping[str, str]) -> Path:
    """The checkout of the configuration, else of the request, else of the environment."""
    requested = spec.config.get("checkout") or spec.checkout
    directory = requested or environment.get(CHECKOUT)
    if not isinstance(directory, str):
        reason = f"no CORL checkout: the request names none, and {CHECKOUT} is not set in the run service"
        raise ConfigError("script", spec.script, reason, CLONE)
    checkout = (spec.invoked_from / Path(directory).expanduser()).resolve()
    if not (checkout / "algorithms" / "offline").is_dir():
        source = "" if requested else f" ({CHECKOUT} in the environment of the run service)"
        reason = f"is not a CORL checkout{source}: it has no algorithms/offline"
        raise ConfigError("script", str(checkout), reason, CLONE)
    return checkout


def list_scripts(checkout: Path) -> list[str]:
    """The names of the scripts, as `--script` takes them."""
    return [
        prefix + path.stem
        for folder, prefix in _FOLDERS.items()
        for path in sorted((checkout / "algorithms" / folder).glob("*.py"))
        if path.stem != "__init__"
    ]


def script_name(path: Path) -> str:
    """The name of the script in a file."""
    return _FOLDERS[path.parent.name] + path.stem


def find_script(name: str, checkout: Path) -> Path:
    """The file of a script. Raises `ConfigError` with the nearest names if there is none."""
    if leaves_directory(name):
        raise ConfigError("script", name, "must be in the checkout", "Give its name, such as td3_bc")
    stem = name.removeprefix("algorithms/").removeprefix("offline/").removesuffix(".py")
    path = checkout / "algorithms" / f"{stem if '/' in stem else f'offline/{stem}'}.py"
    if stem in list_scripts(checkout) and path.is_file() and path.resolve().is_relative_to(checkout):
        return path
    close = closest_names(stem, list_scripts(checkout))
    remedy = f"Nearest: {', '.join(close)}" if close else f"There are {', '.join(list_scripts(checkout)[:16])}"
    raise ConfigError("script", name, f"is not in {checkout / 'algorithms'}", remedy)


def find_base_config(name: object, checkout: Path) -> Path | None:
    """The file of `config_path`; None if it is not given. Raises `ConfigError` with the nearest names."""
    if name is None or name == "":
        return None
    configs = checkout / "configs"
    if not isinstance(name, str) or leaves_directory(name):
        raise ConfigError("config_path", name, "must be a file of the checkout's configs", "Give its relative path")
    stem = name.removeprefix("configs/").removesuffix(".yaml")
    path = configs / f"{stem}.yaml"
    if path.is_file() and path.resolve().is_relative_to(checkout):
        return path
    known = [str(file.relative_to(configs).with_suffix("")) for file in configs.rglob("*.yaml")]
    close = closest_names(stem, known)
    remedy = f"Nearest: {', '.join(close)}" if close else f"Look into {configs}"
    raise ConfigError("config_path", name, "is not in the configs of the checkout", remedy)
