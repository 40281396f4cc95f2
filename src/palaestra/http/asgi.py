"""What the ASGI middleware of the gateway and of the run service share: bearer tokens, request bodies, JSON replies."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class BodyTooLarge(Exception):
    """A request body exceeds its limit."""


def has_token(authorization: bytes, token: bytes) -> bool:
    """Whether an `Authorization` header holds this bearer token."""
    scheme, _, given = authorization.partition(b" ")
    # Constant time, so that the duration does not reveal how much of a guess is right.
    return hmac.compare_digest(given.strip(), token) and scheme.lower() == b"bearer"


async def read_body(receive: Receive, limit: int) -> bytes | None:
    """A whole request body; `BodyTooLarge` when it exceeds `limit` bytes, None when the client disconnected."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > limit:
            raise BodyTooLarge
        if not message.get("more_body", False):
            return bytes(body)


def replay_body(body: bytes, receive: Receive) -> Receive:
    """A `receive` for the inner application that returns the body first, then the messages of `receive`."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


async def send_json(
    send: Send, status: int, document: object, headers: Mapping[str, str] | None = None, *, close: bool = False
) -> None:
    """Send a JSON response; `close` ends the connection, because the rest of the request is not read."""
    body = json.dumps(document).encode()
    fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    if status == 401:
        fields["www-authenticate"] = 'Bearer realm="palaestra"'
    if close:
        fields["connection"] = "close"
    raw = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
