"""Errors as JSON responses, in one format for the API and the proxy.

    {"error": {"code": "no_session", "message": "...", "reason": "..."}}

Only `environment_failed` has a `reason`: the session broke, and nothing in the response is a reward.
"""

from __future__ import annotations

import math

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.http.asgi import Scope, Send, send_json

FORWARDED_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

_TIMEOUTS = ("session_timeout", "open_timeout", "peer_timeout")
_UNAVAILABLE = ("no_server", "peer_unreachable")


class ErrorResponse:
    """Status, headers and document of an error response."""

    def __init__(self, status: int, code: str, message: str, *, reason: str = "") -> None:
        error = {"code": code, "message": message, **({"reason": reason} if reason else {})}
        self.status, self.document = status, {"error": error}
        self.headers: dict[str, str] = {}


def error_response(error: SessionRefused | SessionFailed) -> ErrorResponse:
    """The response for an exception."""
    if isinstance(error, SessionFailed):
        status = 503 if error.reason in _UNAVAILABLE else 504 if error.reason in _TIMEOUTS else 502
        return ErrorResponse(status, "environment_failed", error.detail, reason=error.reason)
    response = ErrorResponse(error.status, error.code, str(error))
    if error.retry_after is not None:
        response.headers["retry-after"] = str(math.ceil(error.retry_after))
    if error.status == 405:
        response.headers["allow"] = ", ".join(FORWARDED_METHODS)
    return response


async def send_error(send: Send, error: SessionRefused | SessionFailed, *, close: bool = False) -> int:
    """Send an error response and return its status; `close` when the rest of the request is not read."""
    response = error_response(error)
    await send_json(send, response.status, response.document, response.headers, close=close)
    return response.status


def content_length(scope: Scope) -> bytes | None:
    """The `Content-Length` header of a request, in digits."""
    return next((value for name, value in scope["headers"] if name == b"content-length"), None)
