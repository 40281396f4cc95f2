"""Errors as the wire knows them, for whoever answers: one shape, whatever went wrong.

    {"error": {"code": "no_session", "message": "...", "reason": "..."}}

`reason` is there for `environment_failed` alone: the session broke, and nothing in this answer is a reward.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from palaestra.errors import SessionFailed, SessionRefused

__all__ = [
    "FORWARDED",
    "Asgi",
    "ErrorReply",
    "Message",
    "Receive",
    "Scope",
    "Send",
    "announced",
    "error_reply",
    "read_body",
    "send_error",
]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Asgi: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

FORWARDED = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
"""The methods that are forwarded to sessions."""

_TIMEOUTS = ("session_timeout", "open_timeout")


class ErrorReply:
    """A status, headers and a document."""

    def __init__(self, status: int, code: str, message: str, *, reason: str = "", **headers: str) -> None:
        error = {"code": code, "message": message, **({"reason": reason} if reason else {})}
        self.status, self.document = status, {"error": error}
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def error_reply(error: SessionRefused | SessionFailed) -> ErrorReply:
    """The answer that an error of ours becomes."""
    if isinstance(error, SessionFailed):
        status = 503 if error.reason == "no_server" else 504 if error.reason in _TIMEOUTS else 502
        return ErrorReply(status, "environment_failed", error.detail, reason=error.reason)
    headers = {}
    if error.retry_after is not None:
        headers["retry_after"] = str(math.ceil(error.retry_after))
    if error.status == 401:
        headers["www_authenticate"] = 'Bearer realm="palaestra"'
    if error.status == 405:
        headers["allow"] = ", ".join(FORWARDED)
    return ErrorReply(error.status, error.code, str(error), **headers)


async def send_error(send: Send, error: SessionRefused | SessionFailed, *, close: bool = False) -> int:
    """Answer with an error; `close` when the rest of the request will not be read. The status."""
    reply = error_reply(error)
    body = json.dumps(reply.document).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in reply.headers.items()]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
    return reply.status


def announced(scope: Scope) -> bytes | None:
    """The announced length of a request's body, in digits."""
    return next((value for name, value in scope["headers"] if name == b"content-length"), None)


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes | None:
    """A whole request body of at most `limit` bytes, refused with 413 beyond that; None when the client left half way.

    What is announced to be too large is refused before any of it comes.
    """
    too_large = SessionRefused("too_large", f"the request is larger than {limit} bytes.", status=413)
    if int(announced(scope) or 0) > limit:
        raise too_large
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)
