"""The OpenAPI document of a session server.

It is written by hand, because requests are parsed by hand for speed, and because other servers and clients are written
against it. A test fuzzes the server with it.
"""

from __future__ import annotations

from typing import Any

from palaestra.sessions.action import (
    MAX_KEYS,
    MAX_PATH,
    MAX_SCROLL,
    MAX_TEXT,
    MAX_WAIT_S,
)
from palaestra.sessions.keys import MODIFIERS
from palaestra.sessions.query_language import ACTION_TYPES, MAX_DELAY_S
from palaestra.sessions.task import MAX_SEED, SCHEMA
from palaestra.sessions.wire import STEP_HEADER

SESSION_ID = "[a-z0-9-]{1,64}"
"""Pattern of session ids."""


def _object(properties: dict[str, Any], *optional: str, more: bool = False) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": more}
    return {**schema, "required": required} if required else schema


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _enum(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


def _integer(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


_SCHEMA = {"type": "integer", "const": SCHEMA}
_POINT = {"type": "array", "items": _integer(0, 65_535), "minItems": 2, "maxItems": 2}
_POINT_OR_POINTER = {"anyOf": [_POINT, {"type": "null"}], "description": "null: where the pointer is"}
_BUTTON = {**_enum("left", "middle", "right"), "default": "left"}
# No control characters but tab and newline, no halves of surrogate pairs.
_TEXT = {
    "type": "string",
    "minLength": 1,
    "maxLength": MAX_TEXT,
    "pattern": "^[\\t\\n\\u0020-\\uD7FF\\uE000-\\uFFFD]+$",
}


def _action(kind: str, properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    return _object({"kind": {"const": kind, "type": "string"}, **properties}, *optional)


def _actions() -> dict[str, Any]:
    held = {"type": "array", "items": _enum(*MODIFIERS)}
    wheel = _integer(-MAX_SCROLL, MAX_SCROLL)
    keys = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_KEYS}
    click = {"at": _POINT_OR_POINTER, "button": _BUTTON, "times": _integer(1, 3), "held": held}
    return {
        "Click": _action("click", click, "at", "button", "times", "held"),
        "Move": _action("move", {"at": _POINT}),
        "Drag": _action(
            "drag",
            {"path": {"type": "array", "items": _POINT, "minItems": 2, "maxItems": MAX_PATH}, "button": _BUTTON},
            "button",
        ),
        "TypeText": _action("type", {"text": _TEXT}),
        "PressKeys": _action("press", {"keys": keys}),
        "Scroll": _action("scroll", {"at": _POINT_OR_POINTER, "dx": wheel, "dy": wheel}, "at", "dx", "dy"),
        "Wait": _action("wait", {"seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_WAIT_S}}),
        "Terminate": _action("terminate", {"success": {"type": "boolean"}}),
        "Answer": _action("answer", {"text": {"type": "string", "maxLength": MAX_TEXT}}),
    }


def _documents() -> dict[str, Any]:
    text, boolean = {"type": "string"}, {"type": "boolean"}
    task = {
        "task": {"type": "string", "pattern": "^[^/]+/.+$", "example": "miniwob/click-button"},
        "seed": _integer(0, MAX_SEED), "params": {"type": "object"},
    }  # fmt: skip
    progress = {
        "schema": _SCHEMA, "reward": {"type": "number"}, "done": boolean, "success": boolean, "truncated": boolean,
        "detail": {"type": "object"},
    }  # fmt: skip
    picture = {
        "sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"}, "width": _integer(1, 65_535),
        "height": _integer(1, 65_535), "media_type": text, "bytes": {"type": "integer"},
    }  # fmt: skip
    begun = {
        "schema": _SCHEMA, **task, "instruction": text, "step_limit": {"type": "integer", "minimum": 1},
        "width": _integer(1, 65_535), "height": _integer(1, 65_535), "step": {"type": "integer", "const": 0},
        "progress": _ref("Progress"),
        "reward_range": {
            "type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2,
            "description": "the lowest and the highest reward of an episode; the highest only for a solved one",
        },
    }  # fmt: skip
    step = {
        "schema": _SCHEMA,
        "step": {"type": "integer"},
        "screenshot": _ref("Screenshot"),
        "progress": _ref("Progress"),
    }
    rows = {
        "submitted_row_indices": {"type": "array", "items": {"type": "integer"}},
        "num_incorrect_submissions": {"type": "integer"},
    }
    error = _object({"code": text, "message": text, "reason": text}, "reason", more=True)
    named = {"type": "string", "pattern": f"^{SESSION_ID}$"}
    return {
        "TaskRequest": _object(task, "seed", "params"),
        "Begun": _object(begun, "reward_range"),
        "ActRequest": _object({"step": {"type": "integer", "minimum": 1}, "action": _ref("UiAction")}),
        "Step": _object(step),
        "Screenshot": _object(picture),
        "Progress": _object(progress),
        "ProgressReport": _object({**progress, **rows}, *rows),
        "Error": _object({"error": error}),
        "SessionRequest": _object({"session_id": named}, "session_id"),
        "SessionOpened": _object({"session_id": named}),
        "SessionDeleted": _object({"deleted": named}),
        "SessionList": _object({"schema": _SCHEMA, "sessions": {"type": "array", "items": named}}),
        "Health": _object({"schema": _SCHEMA, "ready": boolean, "sessions": {"type": "integer"}}),
        "SessionHealth": _object({"schema": _SCHEMA, "ready": boolean, "session_id": named}),
    }


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(name)}}


_PNG = {"image/png": {"schema": {"type": "string", "format": "binary"}}}
_REFUSALS = {
    400: "malformed JSON (`bad_json`)", 403: "from a web page of another origin (`foreign_origin`)",
    404: "no such session or task (`no_session`, `unknown_task`)",
    409: "not in this state (`not_reset`, `step_conflict`, `step_out_of_order`, `episode_over`, `session_exists`)",
    413: "the body is larger than 1 MB (`too_large`)",
    422: "invalid (`bad_request`, `bad_params`, `invalid_action`, `step_required`)",
    500: "the session (`environment_failed` with a `reason`) or the server (`internal`) failed",
    503: "the server is shutting down (`stopping`)",
}  # fmt: skip


def _operation(
    name: str, summary: str, answer: dict[str, Any], errors: tuple[int, ...], *, body: str = "",
    body_required: bool = True, status: int = 200, parameters: tuple[dict[str, Any], ...] = (),
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    responses: dict[str, Any] = {str(status): answer, **(extra or {})}
    for code in errors:
        responses[str(code)] = {"description": _REFUSALS[code], "content": _json("Error")}
    operation: dict[str, Any] = {"operationId": name, "summary": summary, "responses": responses}
    if parameters:
        operation["parameters"] = list(parameters)
    if body:
        operation["requestBody"] = {"required": body_required, "content": _json(body)}
    return operation


def _query_parameters() -> tuple[dict[str, Any], ...]:
    text, place = {"type": "string"}, _integer(0, 65_535)
    keys = {**text, "description": "names joined by '+', such as ctrl+shift+c"}
    step = {
        "type": "integer",
        "minimum": 1,
        "description": "number of the act in its episode; required for all but screenshot",
    }
    delay = {
        "type": "number",
        "minimum": 0,
        "maximum": MAX_DELAY_S,
        "description": "accepted and ignored: the screenshot shows a settled page",
    }
    schemas = {
        "action_type": _enum(*ACTION_TYPES), "step": step, "x": place, "y": place,
        "text": {**text, "maxLength": MAX_TEXT}, "keys": keys, "direction": _enum("up", "down"), "delay": delay,
    }  # fmt: skip
    return tuple(
        {"name": name, "in": "query", "required": name == "action_type", "schema": schema}
        for name, schema in schemas.items()
    )


def _session_paths(prefix: str, parameters: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    suffix = "_session" if parameters else ""
    etag = {"ETag": {"schema": {"type": "string"}, "description": "the screenshot's SHA-256"}}
    line = {STEP_HEADER: {"schema": {"type": "string"}, "description": "the `Step` document in one line of ASCII"}}
    picture = {"description": "the current screen", "content": {**_PNG, **_json("Screenshot")}, "headers": etag}
    acted = {"description": "the result", "content": {**_json("Step"), **_PNG}, "headers": line}
    unchanged = {"304": {"description": "the screen has not changed since the ETag in If-None-Match"}}
    missing = (404,) if parameters else ()
    return {
        f"{prefix}/reset": {"post": _operation(
            f"reset{suffix}", "Begin an episode on a new screen",
            {"description": "the resolved task", "content": _json("Begun")},
            (400, 404, 413, 422, 500, 503), body="TaskRequest", parameters=parameters,
        )},
        f"{prefix}/act": {"post": _operation(
            f"act{suffix}", "Perform an action once; a repeated step returns the stored result", acted,
            (400, *missing, 409, 413, 422, 500), body="ActRequest", parameters=parameters,
        ), "get": _operation(
            f"act_by_query{suffix}", "The query-string dialect: the same act, returns the screenshot", acted,
            (403, *missing, 409, 422, 500), parameters=(*parameters, *_query_parameters()),
        )},
        f"{prefix}/screenshot": {"get": _operation(
            f"screenshot{suffix}", "The current screen", picture, (*missing, 409, 500), parameters=parameters,
            extra=unchanged,
        )},
        f"{prefix}/progress": {"get": _operation(
            f"progress{suffix}", "The verifier's judgement",
            {"description": "the verifier's judgement", "content": _json("ProgressReport")}, (*missing, 409, 500),
            parameters=parameters,
        )},
    }  # fmt: skip


def build_openapi(version: str) -> dict[str, Any]:
    """The whole document."""
    name = {"type": "string", "pattern": f"^{SESSION_ID}$"}
    named = ({"name": "session_id", "in": "path", "required": True, "schema": name},)
    health = {"description": "ready", "content": _json("Health")}
    root = {"description": "ready", "content": {"text/plain": {"schema": {"type": "string"}}}}
    opened = {"description": "opened", "content": _json("SessionOpened")}
    listed = {"description": "every open session", "content": _json("SessionList")}
    deleted = {"description": "closed", "content": _json("SessionDeleted")}
    there = {"description": "it exists", "content": _json("SessionHealth")}
    actions = _actions()
    paths: dict[str, Any] = {
        "/": {"get": _operation("root", "Whether the server is ready, as a line of text", root, ())},
        "/health": {"get": _operation("health", "Whether the server is ready", health, ())},
        "/sessions": {
            "get": _operation("list_sessions", "List the open sessions", listed, ()),
            "post": _operation(
                "open_session", "Open a session", opened, (400, 409, 413, 422, 503), body="SessionRequest",
                body_required=False, status=201,
            ),
        },
        "/sessions/{session_id}": {
            "delete": _operation("delete_session", "Close a session", deleted, (404,), parameters=named)
        },
        "/sessions/{session_id}/health": {
            "get": _operation("health_session", "Whether a session exists", there, (404,), parameters=named)
        },
        **_session_paths("/sessions/{session_id}", named),
        **_session_paths("", ()),
    }  # fmt: skip
    schemas = {**actions, "UiAction": {"oneOf": [_ref(name) for name in actions]}, **_documents()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Palaestra session server", "version": version},
        "paths": paths,
        "components": {"schemas": schemas},
    }
