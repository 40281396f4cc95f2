"""All runners: built-in ones, and those that installed packages register under `palaestra.runners`.

A runner that cannot be loaded is reported by a warning and by `palaestra doctor`; the others keep working.
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

RUNNERS = {
    "palaestra": "palaestra.runs.runners.palaestra:PalaestraRunner",
    "cleanrl": "palaestra.runs.runners.cleanrl:CleanrlRunner",
    "corl": "palaestra.runs.runners.corl:CorlRunner",
    "sb3": "palaestra.runs.runners.sb3:Sb3Runner",
    "spade-bdi": "palaestra.runs.runners.spade_bdi:SpadeBdiRunner",
    "script": "palaestra.runs.runners.script:ScriptRunner",
    "echo": "palaestra.runs.runners.echo:EchoRunner",
}
GROUP = "palaestra.runners"
_log = logging.getLogger(__name__)


def registered_runners() -> dict[str, Runner]:
    """All runners that can be loaded, by name. Packages cannot replace built-in runners."""
    return dict(_load()[0])


def broken_runners() -> dict[str, str]:
    """Names of registered runners that cannot be loaded, with the reasons."""
    return dict(_load()[1])


def get_runner(name: str) -> Runner:
    """The runner with this name. Raises `ConfigError` with the closest name."""
    runners, broken = _load()
    if name in runners:
        return runners[name]
    if name in broken:
        raise ConfigError("runner", name, f"is installed and cannot be loaded ({broken[name]})", "Repair its package")
    raise ConfigError("runner", name, "no such runner", _suggest(name, runners))


def add_installed_runners(runners: dict[str, Runner]) -> dict[str, str]:
    """Add runners of packages that were installed after this process started; returns load errors by name.

    Existing entries stay: a runner of an upgraded package needs a new process.
    """
    invalidate_caches()
    added, broken = _load_runners(runners)
    for name, runner in added.items():
        _log.info("added the newly installed runner %s", name)
        runners[name] = runner
    return broken


def runner_not_found(name: str, runners: Mapping[str, Runner], broken: Mapping[str, str]) -> LaunchRefused:
    """The error of a service that does not have this runner, although other processes may have it."""
    if name in broken:
        reason = f"is installed, but the running service cannot load it ({broken[name]})"
        remedy = "Restart the service: palaestra serve --stop; the next command starts it again, and runs continue"
        return LaunchRefused("runner", name, reason, remedy)
    remedy = _suggest(name, runners)
    where = "" if remedy.endswith("?") else f" in {sys.prefix}, where the service runs"
    return LaunchRefused("runner", name, f"no such runner{where}", remedy)


def _suggest(name: str, runners: Mapping[str, Runner]) -> str:
    close = closest_names(name, runners, count=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(sorted(runners))}"


@lru_cache(maxsize=1)
def _load() -> tuple[dict[str, Runner], dict[str, str]]:
    runners, broken = _load_runners(())
    for name, reason in broken.items():
        _log.warning("runner %s cannot be loaded: %s", name, reason)
    return runners, broken


def _load_runners(known: Collection[str]) -> tuple[dict[str, Runner], dict[str, str]]:
    """Load the registered runners that are not known yet; returns runners and load errors by name."""
    addresses = {entry.name: entry.value for entry in entry_points(group=GROUP)} | RUNNERS
    runners: dict[str, Runner] = {}
    broken: dict[str, str] = {}
    for name, address in sorted(addresses.items()):
        if name in known:
            continue
        try:
            runners[name] = import_address(address, place="runner")()
        except Exception as error:  # noqa: BLE001 - an error in a foreign package must not affect other runners
            broken[name] = error.reason if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    return runners, broken
