"""The documents that session servers and clients exchange: JSON read strictly, written in ASCII, errors both ways.

Both sides are here so that they cannot disagree: what the server says with `error_document` the client turns back into
the same exception with `error_told`. Knows nothing of sockets or frameworks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from palaestra.config import closest_names
from palaestra.errors import InvalidAction, PalaestraError, SessionFailed, SessionRefused
from palaestra.sessions.action import UiAction, decode
from palaestra.sessions.session import Step
from palaestra.sessions.task import SCHEMA, Progress, TaskRequest, TaskSpec
from palaestra.strict_json import read_json

__all__ = [
    "MAX_BODY",
    "SESSION_TOKEN_HEADER",
    "STEP_HEADER",
    "act_asked",
    "begun_document",
    "error_document",
    "error_told",
    "object_read",
    "only",
    "step_document",
    "step_header",
    "task_asked",
    "written",
]

MAX_BODY = 1_000_000
"""Bytes of a request's body; the longest text an action may type is far below it."""

STEP_HEADER = "X-Palaestra-Step"
"""The header that carries an act's document beside its picture."""

SESSION_TOKEN_HEADER = "X-Palaestra-Session-Token"
"""The header by which a gateway knows the client that opened a session."""

MAX_HEADER = 4096
"""Bytes of it; clients and proxies commonly refuse a header from 8 KB on."""

MAX_DEPTH = 64
"""Lists and objects inside one another; whatever is refused further on must still fit into a message."""

MAX_MESSAGE = 1000


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def written(document: Mapping[str, Any]) -> bytes:
    """One line of ASCII, fit for a body and for a header."""
    return _ENCODER.encode(document).encode("ascii")


def object_read(body: bytes, *, absent: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object in a body; `absent` stands for an empty one, which is refused otherwise."""
    if not body and absent is not None:
        return dict(absent)
    try:
        document = read_json(body)
    except ValueError as error:
        raise SessionRefused("bad_json", f"the body is not JSON in UTF-8 ({error}).", status=400) from None
    if not isinstance(document, dict):
        raise SessionRefused("bad_request", "the body is not a JSON object.", status=422)
    if _deeper_than(document, MAX_DEPTH):
        raise SessionRefused("bad_json", f"the body is nested more than {MAX_DEPTH} deep.", status=400)
    return document


def _deeper_than(document: Any, depth: int) -> bool:
    level = [document]
    for _ in range(depth):
        holding = [value for value in level if isinstance(value, dict | list)]
        if not holding:
            return False
        level = [inner for value in holding for inner in (value.values() if isinstance(value, dict) else value)]
    return any(isinstance(value, dict | list) for value in level)


def only(document: Mapping[str, Any], *known: str) -> None:
    """Refuse keys that mean nothing, with the nearest that does."""
    for key in document:
        if key not in known:
            close = closest_names(key, known, count=1)
            remedy = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
            raise SessionRefused("bad_request", f"{key[:100]!r}: unknown key. {remedy}", status=422)


def task_asked(document: Mapping[str, Any]) -> TaskRequest:
    """What a reset asks for."""
    only(document, "task", "seed", "params")
    return TaskRequest(document.get("task"), document.get("seed", 0), document.get("params", {}))  # type: ignore[arg-type]


def act_asked(document: Mapping[str, Any]) -> tuple[int, UiAction]:
    """The step and the action of an act."""
    only(document, "step", "action")
    if "step" not in document:
        raise SessionRefused("bad_request", "'step': required and not given.", status=422)
    try:
        action = decode(document.get("action"))
    except (TypeError, OverflowError):
        # JSON has values of kinds that no action thinks of: a list for a key's name, a number too large for a float.
        raise InvalidAction("action", document["action"], "holds a value of the wrong kind") from None
    return document["step"], action


def begun_document(spec: TaskSpec, progress: Progress) -> dict[str, Any]:
    """The answer to a reset."""
    return {"schema": SCHEMA, **spec.facts(), "step": 0, "progress": progress.facts()}


def step_document(step: Step) -> dict[str, Any]:
    """The answer to an act."""
    return {
        "schema": SCHEMA, "step": step.number, "screenshot": step.screenshot.facts(), "progress": step.progress.facts(),
    }  # fmt: skip


def step_header(document: dict[str, Any]) -> bytes:
    """The same for a header; where it would be too long `progress.detail` is left out and `detail_left_out` says so."""
    line = written(document)
    if len(line) <= MAX_HEADER:
        return line
    progress = {name: value for name, value in document["progress"].items() if name != "detail"}
    return written({**document, "progress": {**progress, "detail_left_out": True}})


def error_document(error: PalaestraError) -> dict[str, Any]:
    """The body that tells of an error we raise on purpose."""
    if isinstance(error, SessionFailed):
        told = {"code": "environment_failed", "reason": error.reason, "message": error.detail[:MAX_MESSAGE]}
    elif isinstance(error, SessionRefused):
        told = {"code": error.code, "message": str(error)[:MAX_MESSAGE]}
    else:
        told = {"code": "internal", "message": str(error)[:MAX_MESSAGE]}
    return {"error": told}


def error_told(status: int, body: bytes, *, retry_after: float | None = None) -> PalaestraError:
    """The exception that an answer of 400 and above stands for."""
    try:
        told = read_json(body)["error"]
        code, message = str(told["code"]), str(told["message"])
    except (ValueError, KeyError, TypeError):
        # Not our server's words: a proxy on the way, or something else at this address.
        said = body[:200].decode("utf-8", "replace").strip()
        if status >= 500:
            return SessionFailed("bad_answer", f"status {status} without a reason: {said!r}")
        return SessionRefused("bad_answer", f"status {status} without a reason: {said!r}", status=status)
    if code == "environment_failed":
        return SessionFailed(str(told.get("reason", "unknown")), message)
    if code == "internal":
        return SessionFailed("internal", message)
    if code == "invalid_action":
        return _ToldInvalid(message)
    return SessionRefused(code, message, status=status, retry_after=retry_after)


class _ToldInvalid(InvalidAction):
    """An `InvalidAction` whose text was made elsewhere."""

    def __init__(self, text: str) -> None:
        SessionRefused.__init__(self, "invalid_action", text, status=422)
        self.place, self.value, self.reason, self.remedy = "action", None, text, ""
