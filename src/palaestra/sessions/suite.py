"""A task is a page and a verifier; a suite is a family of tasks by name.

A task says how large its screen is, what its page loads, what the agent is told, and how to judge how far it has come.
It runs beside the browser, not in it: the page can be looked into by a JavaScript expression (`probe`), and whatever
the page sends to its own origin arrives in `serve`. Everything follows from name, seed and parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from palaestra.config import closest_names
from palaestra.errors import SessionRefused
from palaestra.sessions.page import PageRequest, PageResponse
from palaestra.sessions.screen import Size
from palaestra.sessions.task import Progress

__all__ = ["Suite", "Task", "checked_params"]


class Task:
    """One task, ready to be shown. Subclasses set what they need and write `judge`."""

    screen = Size(160, 210)
    step_limit = 20
    reward_range: tuple[float, float] | None = None
    """The least and the most that a whole episode can be paid; the most is paid for a solved one and for no other.
    None: not declared; a learner then assumes `reward.assumed_range` of its configuration."""
    entry = "/"
    """Where the page begins."""
    html = ""
    """The page there, unless `serve` does better."""
    begin = "null"
    """A JavaScript expression evaluated once the page has loaded; its value goes to `told`."""
    probe = "null"
    """A JavaScript expression evaluated whenever the task is judged; its value goes to `judge`."""

    def serve(self, request: PageRequest) -> PageResponse | None:
        """Answer what the page asks its own origin for; None is a 404."""
        return PageResponse(self.html.encode()) if request.path == self.entry else None

    def told(self, begun: Any) -> str:
        """The instruction, in words."""
        raise NotImplementedError

    def judge(self, probed: Any) -> Progress:
        """How far the task has come."""
        raise NotImplementedError


class Suite(Protocol):
    """Tasks by name."""

    name: str

    def names(self) -> Sequence[str]:
        """Every task there is."""

    def make(self, name: str, seed: int, params: Mapping[str, Any]) -> Task:
        """The task; `SessionRefused` (`unknown_task`, `bad_params`) when there is none such."""


def checked_params(given: Mapping[str, Any], **known: tuple[type, Any]) -> dict[str, Any]:
    """The parameters with their defaults, `name=(type, default)`; unknown names and wrong types are refused."""
    for key in given:
        if key not in known:
            close = closest_names(key, known, count=1)
            remedy = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known) or 'none'}."
            raise SessionRefused("bad_params", f"params.{key} = {given[key]!r}: unknown. {remedy}", status=422)
    result = {}
    for key, (kind, default) in known.items():
        value = given.get(key, default)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            text = f"params.{key} = {value!r}: must be of type {kind.__name__}."
            raise SessionRefused("bad_params", text, status=422)
        result[key] = value
    return result
