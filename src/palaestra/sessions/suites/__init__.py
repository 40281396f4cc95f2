"""The suites of tasks; other packages add theirs as entry points `palaestra.suites`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from palaestra.config import closest_names, import_address, suggest_name
from palaestra.errors import SessionRefused
from palaestra.extras import install_command, is_installed
from palaestra.sessions.suite import Suite, Task

__all__ = ["make_task", "suites"]

_BUILT_IN = {
    "click_target": "palaestra.sessions.suites.click_target:ClickTarget",
    "data_entry": "palaestra.sessions.suites.data_entry:DataEntry",
    "miniwob": "palaestra.sessions.suites.miniwob:MiniWob",
}


@cache
def suites() -> dict[str, Suite]:
    """Every suite by name: the built-in ones and those of installed packages."""
    by_name: dict[str, Suite] = {name: import_address(address, place="suite")() for name, address in _BUILT_IN.items()}
    for entry in entry_points(group="palaestra.suites"):
        by_name[entry.name] = entry.load()()
    return by_name


def make_task(suite: str, name: str, seed: int, params: Mapping[str, Any]) -> Task:
    """The task `suite/name`; refuses unknown names and suggests the closest one."""
    known = suites()
    if suite not in known:
        remedy = suggest_name(suite, known, f"There are {', '.join(sorted(known))}.")
        raise SessionRefused("unknown_task", f"task = '{suite}/{name}': no suite has this name. {remedy}", status=404)
    if suite == "miniwob" and not is_installed("miniwob"):
        text = f"task = '{suite}/{name}': miniwob is not installed. Run: {install_command('ui')}"
        raise SessionRefused("unknown_task", text, status=404)
    if name not in known[suite].names():
        close = closest_names(name, known[suite].names(), count=1)
        remedy = f"Did you mean '{suite}/{close[0]}'?" if close else "`palaestra tasks` lists them."
        text = f"task = '{suite}/{name}': the suite has no such task. {remedy}"
        raise SessionRefused("unknown_task", text, status=404)
    return known[suite].make(name, seed, params)
