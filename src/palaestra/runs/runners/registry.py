"""Every runner there is: ours by name, and those that installed packages announce under `palaestra.runners`.

A package whose runner cannot be loaded is a warning and a line of `palaestra doctor`; the others go on working.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Mapping
from functools import lru_cache
from importlib import invalidate_caches
from importlib.metadata import entry_points

from palaestra.config import closest_names, import_address
from palaestra.errors import ConfigError, LaunchRefused
from palaestra.runs.runner import Runner

__all__ = ["RUNNERS", "add_installed_runners", "broken_runners", "get_runner", "registered_runners", "runner_not_found"]

RUNNERS = {
    "palaestra": "palaestra.runs.runners.palaestra:PalaestraRunner",
    "cleanrl": "palaestra.runs.runners.cleanrl:CleanrlRunner",
    "sb3": "palaestra.runs.runners.sb3:Sb3Runner",
    "echo": "palaestra.runs.runners.echo:EchoRunner",
}
GROUP = "palaestra.runners"
_log = logging.getLogger(__name__)


def registered_runners() -> dict[str, Runner]:
    """Every runner that can be loaded, by name; ours cannot be replaced by somebody else's."""
    return dict(_load()[0])


def broken_runners() -> dict[str, str]:
    """What was announced and cannot be loaded: name and reason."""
    return dict(_load()[1])


def get_runner(name: str) -> Runner:
    """One runner, or `ConfigError` with the nearest name."""
    found, broken = _load()
    if name in found:
        return found[name]
    if name in broken:
        raise ConfigError("runner", name, f"is installed and cannot be loaded ({broken[name]})", "Repair its package")
    raise ConfigError("runner", name, "no such runner", _nearest(name, found))


def add_installed_runners(runners: dict[str, Runner]) -> dict[str, str]:
    """Add runners of packages that were installed since this process started; why others cannot be loaded, by name.

    What is there already stays as it is: code of a package that was upgraded meanwhile needs a new process.
    """
    invalidate_caches()
    found, broken = _load_runners(runners)
    for name, runner in found.items():
        _log.info("runner %s was installed meanwhile", name)
        runners[name] = runner
    return broken


def runner_not_found(name: str, runners: Mapping[str, Runner], broken: Mapping[str, str]) -> LaunchRefused:
    """The refusal of a service that has no such runner, although other processes may have."""
    if name in broken:
        reason = f"is installed, and the service that runs cannot load it ({broken[name]})"
        remedy = "Restart the service: palaestra serve --stop ends it, and the next command starts another; runs go on"
        return LaunchRefused("runner", name, reason, remedy)
    remedy = _nearest(name, runners)
    where = "" if remedy.endswith("?") else f" in {sys.prefix}, where the service runs"
    return LaunchRefused("runner", name, f"no such runner{where}", remedy)


def _nearest(name: str, runners: Mapping[str, Runner]) -> str:
    close = closest_names(name, runners, count=1)
    return f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(sorted(runners))}"


@lru_cache(maxsize=1)
def _load() -> tuple[dict[str, Runner], dict[str, str]]:
    found, broken = _load_runners(())
    for name, reason in broken.items():
        _log.warning("runner %s cannot be loaded: %s", name, reason)
    return found, broken


def _load_runners(known: Collection[str]) -> tuple[dict[str, Runner], dict[str, str]]:
    """Every runner that is announced and not known yet, and why some cannot be loaded."""
    addresses = {entry.name: entry.value for entry in entry_points(group=GROUP)} | RUNNERS
    found: dict[str, Runner] = {}
    broken: dict[str, str] = {}
    for name, address in sorted(addresses.items()):
        if name in known:
            continue
        try:
            found[name] = import_address(address, place="runner")()
        except Exception as error:  # noqa: BLE001 - whatever a foreign package does on import, the others must work
            broken[name] = error.reason if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    return found, broken
