"""`Task` is a page and its verifier; `Suite` is a set of tasks by name.

A task defines the size of its screen, the page, the instruction and the verifier. It runs in this process, not in the
browser: `probe` is a JavaScript expression whose value the verifier gets, and requests of the page to its own origin
arrive in `serve`. Name, seed and parameters determine everything.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from palaestra.config import suggest_name
from palaestra.errors import SessionRefused
from palaestra.sessions.screen import Size
from palaestra.sessions.task import TaskProgress


@dataclass(frozen=True)
class PageRequest:
    """A request of the page to its own origin."""

    method: str
    path: str
    body: bytes


@dataclass(frozen=True)
class PageResponse:
    """The task's response."""

    body: bytes
    media_type: str = "text/html; charset=utf-8"
    status: int = 200


class Task:
    """One task. Subclasses set attributes and implement `instruction` and `judge`."""

    screen = Size(160, 210)
    step_limit = 20
    reward_range: tuple[float, float] | None = None
    """The lowest and the highest reward of an episode; the highest only for a solved one. None: not declared; a learner
    then assumes `reward.assumed_range` of its configuration."""
    entry = "/"
    """Path of the page."""
    html = ""
    """The HTML of the page, unless `serve` is overridden."""
    begin = "null"
    """JavaScript expression evaluated once the page has loaded; its value is passed to `instruction`."""
    probe = "null"
    """JavaScript expression evaluated whenever the task is judged; its value is passed to `judge`."""
    oracle: str | None = None
    """JavaScript expression whose value is the next action of a scripted solution as JSON, or null when nothing is left
    to do. It is evaluated anew before every action and keeps no state. None: the task has no oracle."""

    preload_key: Hashable = None
    """Tasks of a class with the same key have the same page until `begin` is evaluated, whatever their seed, so that it
    can be loaded before an episode needs it. Random numbers may be drawn meanwhile, but nothing visible may depend on
    them, and `serve` may keep no state. None: the page is loaded when the episode begins."""

    def serve(self, request: PageRequest) -> PageResponse | None:
        """The response to a request of the page to its own origin; None is a 404."""
        return PageResponse(self.html.encode()) if request.path == self.entry else None

    def instruction(self, begin_value: Any) -> str:
        """The instruction for the agent; `begin_value` is the value of `begin`."""
        raise NotImplementedError

    def judge(self, probe_value: Any) -> TaskProgress:
        """The verifier's judgement; `probe_value` is the value of `probe`."""
        raise NotImplementedError


class Suite(Protocol):
    """A set of tasks by name."""

    name: str

    def names(self) -> Sequence[str]:
        """The names of all tasks."""

    def make(self, name: str, seed: int, params: Mapping[str, Any]) -> Task:
        """The task; `SessionRefused` (`unknown_task`, `bad_params`) when it does not exist."""


@runtime_checkable
class DescribedSuite(Suite, Protocol):
    """A suite that describes the parameters of its tasks, for forms."""

    def parameters(self, name: str) -> dict[str, Any]:
        """JSON Schema of each parameter of a task, by name."""


STEP_LIMIT_SCHEMA = {"type": "integer", "minimum": 1, "description": "Maximum number of actions in an episode."}
"""JSON Schema of the parameter `step_limit`, which all tasks of ours have."""


def parse_params(given: Mapping[str, Any], **known: tuple[type, Any]) -> dict[str, Any]:
    """The parameters with defaults filled in, from `name=(type, default)`; refuses unknown names and wrong types."""
    for key in given:
        if key not in known:
            remedy = suggest_name(key, known, f"Known: {', '.join(known) or 'none'}.")
            raise SessionRefused("bad_params", f"params.{key} = {given[key]!r}: unknown. {remedy}", status=422)
    result = {}
    for key, (kind, default) in known.items():
        value = given.get(key, default)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            text = f"params.{key} = {value!r}: must be of type {kind.__name__}."
            raise SessionRefused("bad_params", text, status=422)
        result[key] = value
    return result
