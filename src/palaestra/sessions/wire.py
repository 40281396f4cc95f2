"""The JSON documents that session servers and clients exchange, for both sides.

The client turns what the server writes with `error_document` back into the same exception with `parse_error`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from palaestra.config import suggest_name
from palaestra.errors import InvalidAction, PalaestraError, SessionFailed, SessionRefused
from palaestra.sessions.action import UiAction, decode
from palaestra.sessions.session import Step
from palaestra.sessions.task import SCHEMA, TaskProgress, TaskRequest, TaskSpec
from palaestra.strict_json import read_json

MAX_BODY = 1_000_000
"""Maximum size of a request body in bytes; much more than the longest text of an action."""

STEP_HEADER = "X-Palaestra-Step"
"""The header with the document of a step whose body is the screenshot."""

SESSION_TOKEN_HEADER = "X-Palaestra-Session-Token"
"""The header with the token of a session, by which a gateway identifies the client that opened it."""

MAX_HEADER = 4096
"""Maximum size of that header in bytes; many clients and proxies refuse headers of 8 KB and more."""

MAX_DEPTH = 64
"""Maximum nesting of lists and objects, so that a refused value fits into an error message."""

MAX_MESSAGE = 1000


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def encode_json(document: Mapping[str, Any]) -> bytes:
    """A document as one line of ASCII, for a body or a header."""
    return _ENCODER.encode(document).encode("ascii")


def parse_object(body: bytes, *, default: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object in a body. An empty body is refused unless `default` is given."""
    if not body and default is not None:
        return dict(default)
    try:
        document = read_json(body)
    except ValueError as error:
        raise SessionRefused("bad_json", f"the body is not JSON in UTF-8 ({error}).", status=400) from None
    if not isinstance(document, dict):
        raise SessionRefused("bad_request", "the body is not a JSON object.", status=422)
    if _is_deeper_than(document, MAX_DEPTH):
        raise SessionRefused("bad_json", f"the body is nested more than {MAX_DEPTH} deep.", status=400)
    return document


def _is_deeper_than(document: Any, depth: int) -> bool:
    level = [document]
    for _ in range(depth):
        containers = [value for value in level if isinstance(value, dict | list)]
        if not containers:
            return False
        level = [inner for value in containers for inner in (value.values() if isinstance(value, dict) else value)]
    return any(isinstance(value, dict | list) for value in level)


def check_keys(document: Mapping[str, Any], *known: str) -> None:
    """Refuse unknown keys and suggest the closest known one."""
    for key in document:
        if key not in known:
            remedy = suggest_name(key, known, f"Known: {', '.join(known)}.")
            raise SessionRefused("bad_request", f"{key[:100]!r}: unknown key. {remedy}", status=422)


def parse_task(document: Mapping[str, Any]) -> TaskRequest:
    """The task of a reset request."""
    check_keys(document, "task", "seed", "params")
    return TaskRequest(document.get("task"), document.get("seed", 0), document.get("params", {}))  # type: ignore[arg-type]


def parse_act(document: Mapping[str, Any]) -> tuple[int, UiAction]:
    """Step and action of an act request."""
    check_keys(document, "step", "action")
    if "step" not in document:
        raise SessionRefused("bad_request", "'step': required and not given.", status=422)
    try:
        action = decode(document.get("action"))
    except (TypeError, OverflowError):
        # JSON can hold values of unexpected types: a list for a key's name, a number too large for a float.
        raise InvalidAction("action", document["action"], "holds a value of the wrong kind") from None
    return document["step"], action


def reset_document(spec: TaskSpec, progress: TaskProgress) -> dict[str, Any]:
    """The answer to a reset."""
    return {"schema": SCHEMA, **spec.facts(), "step": 0, "progress": progress.facts()}


def step_document(step: Step) -> dict[str, Any]:
    """The response to an act."""
    return {
        "schema": SCHEMA,
        "step": step.number,
        "screenshot": step.screenshot.facts(),
        "progress": step.progress.facts(),
    }


def step_header(document: dict[str, Any]) -> bytes:
    """The same for a header; if it is too long, `progress.detail` is replaced by `detail_left_out`."""
    line = encode_json(document)
    if len(line) <= MAX_HEADER:
        return line
    progress = {name: value for name, value in document["progress"].items() if name != "detail"}
    return encode_json({**document, "progress": {**progress, "detail_left_out": True}})


def error_document(error: PalaestraError) -> dict[str, Any]:
    """The body of an error response."""
    if isinstance(error, SessionFailed):
        error_fields = {"code": "environment_failed", "reason": error.reason, "message": error.detail[:MAX_MESSAGE]}
    elif isinstance(error, SessionRefused):
        error_fields = {"code": error.code, "message": str(error)[:MAX_MESSAGE]}
    else:
        error_fields = {"code": "internal", "message": str(error)[:MAX_MESSAGE]}
    return {"error": error_fields}


def parse_error(status: int, body: bytes, *, retry_after: float | None = None) -> PalaestraError:
    """The exception for a response with a status of 400 or above."""
    try:
        error_fields = read_json(body)["error"]
        code, message = str(error_fields["code"]), str(error_fields["message"])
    except (ValueError, KeyError, TypeError):
        # Not from our server: a proxy in between, or another server at this address.
        text = body[:200].decode("utf-8", "replace").strip()
        if status >= 500:
            return SessionFailed("bad_answer", f"status {status} without a reason: {text!r}")
        return SessionRefused("bad_answer", f"status {status} without a reason: {text!r}", status=status)
    if code == "environment_failed":
        return SessionFailed(str(error_fields.get("reason", "unknown")), message)
    if code == "internal":
        return SessionFailed("internal", message)
    if code == "invalid_action":
        return _RemoteInvalidAction(message)
    return SessionRefused(code, message, status=status, retry_after=retry_after)


class _RemoteInvalidAction(InvalidAction):
    """An `InvalidAction` with the text of the server."""

    def __init__(self, text: str) -> None:
        SessionRefused.__init__(self, "invalid_action", text, status=422)
        self.place, self.value, self.reason, self.remedy = "action", None, text, ""
