"""Every runner there is: ours by name, and those that installed packages announce under `palaestra.runners`.

A package whose runner cannot be loaded is a warning and a line of `palaestra doctor`; the others go on working.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib.metadata import entry_points

from palaestra.config import imported, nearest
from palaestra.errors import ConfigError
from palaestra.runs.runner import Runner

__all__ = ["RUNNERS", "broken_runners", "registered_runners", "runner_named"]

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


def runner_named(name: str) -> Runner:
    """One runner, or `ConfigError` with the nearest name."""
    found, broken = _load()
    if name in found:
        return found[name]
    if name in broken:
        raise ConfigError("runner", name, f"is installed and cannot be loaded ({broken[name]})", "Repair its package")
    close = nearest(name, found, count=1)
    remedy = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(sorted(found))}"
    raise ConfigError("runner", name, "no such runner", remedy)


@lru_cache(maxsize=1)
def _load() -> tuple[dict[str, Runner], dict[str, str]]:
    addresses = {entry.name: entry.value for entry in entry_points(group=GROUP)} | RUNNERS
    found: dict[str, Runner] = {}
    broken: dict[str, str] = {}
    for name, address in sorted(addresses.items()):
        try:
            found[name] = imported(address, place="runner")()
        except Exception as error:  # noqa: BLE001 - whatever a foreign package does on import, the others must work
            broken[name] = f"{type(error).__name__}: {error}"
            _log.warning("runner %s (%s) cannot be loaded: %s", name, address, broken[name])
    return found, broken
