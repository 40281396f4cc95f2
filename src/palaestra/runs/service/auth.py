"""Who comes in: the token, this machine's name, no web pages, and bodies of a bearable size. Pure ASGI, outermost.

Also knows when the last request was under way, which is what an idle service goes by.
"""

from __future__ import annotations

import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from palaestra.http.hosts import AllowedHosts

__all__ = ["Entrance"]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Asgi: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = logging.getLogger(__name__)
MAX_BODY_BYTES = 1 << 20


class Entrance:
    """Lets requests in."""

    def __init__(self, app: Asgi, token: str, hosts: AllowedHosts | None = None) -> None:
        self._app, self._token = app, token.encode()
        self._hosts = hosts or AllowedHosts("127.0.0.1")
        self._under_way = 0
        self._last = time.monotonic()

    def idle_s(self) -> float:
        """Seconds since the last request was under way."""
        return 0.0 if self._under_way else time.monotonic() - self._last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await _refuse(send, *refusal)
            return
        # A look whether the service is there must not be what keeps it there.
        counted = scope["path"] != "/health"
        self._under_way += counted
        try:
            body = await _read(receive)
            if body is None:
                await _refuse(send, *_TOO_LARGE)
            else:
                await self._app(scope, _replayed(body, receive), send)
        except Exception:  # noqa: BLE001 - one request's trouble is logged, and none of the others'
            # The application has answered, or had begun to: then the server cuts off what has no end.
            _log.exception("%s %s failed", scope["method"], scope["path"])
        finally:
            if counted:
                self._under_way -= 1
                self._last = time.monotonic()

    def _refusal(self, scope: Scope) -> tuple[int, str, str] | None:
        found = {name: value for name, value in scope["headers"] if name in _LOOKED_AT}
        if b"origin" in found:
            # Our clients send none; a web page in a browser on this machine cannot help it.
            return 403, "foreign_origin", "web pages are not served."
        host, server = found.get(b"host", b"localhost").decode("latin-1"), scope.get("server")
        if not self._hosts.allows(host, server[0] if server else None):
            text = f"the service is not known as {host[:200]!r}. Start it with allowed_hosts=[NAME] to allow a name."
            return 403, "foreign_host", text
        if scope["path"] == "/health":
            return None
        scheme, _, given = found.get(b"authorization", b"").partition(b" ")
        # Compared in full whatever the first bytes are, so that the time taken tells nothing.
        if not hmac.compare_digest(given.strip(), self._token) or scheme.lower() != b"bearer":
            text = (
                "the request carries no token, or a wrong one. "
                "Send Authorization: Bearer and what stands in service/token of the state directory."
            )
            return 401, "unauthorised", text
        announced = found.get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > MAX_BODY_BYTES:
            return _TOO_LARGE
        return None


_LOOKED_AT = (b"authorization", b"origin", b"host", b"content-length")
_TOO_LARGE = (413, "too_large", f"the body is larger than {MAX_BODY_BYTES} bytes.")


async def _read(receive: Receive) -> bytes | None:
    """A whole body; None when more comes than was announced and than is allowed."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


async def _refuse(send: Send, status: int, code: str, text: str) -> None:
    body = json.dumps({"error": {"code": code, "text": text, "place": "", "reason": text, "remedy": ""}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="palaestra"'))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})
