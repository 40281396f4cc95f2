"""The outermost ASGI layer of the run service: checks the token, the `Host` header, the origin and the body size.

Also measures how long the service has been idle.
"""

from __future__ import annotations

import logging
import time

from palaestra.http.asgi import (
    AsgiApp,
    BodyTooLarge,
    Receive,
    Scope,
    Send,
    has_token,
    read_body,
    replay_body,
    send_json,
)
from palaestra.http.hosts import AllowedHosts

_log = logging.getLogger(__name__)
MAX_BODY_BYTES = 1 << 20
_TOO_LARGE = (413, "too_large", f"the body is larger than {MAX_BODY_BYTES} bytes.")


class AuthMiddleware:
    """Passes authorised requests on to `app` and refuses all others."""

    def __init__(self, app: AsgiApp, token: str, hosts: AllowedHosts | None = None) -> None:
        self._app, self._token = app, token.encode()
        self._hosts = hosts or AllowedHosts("127.0.0.1")
        self._in_flight = 0
        self._last_request = time.monotonic()

    def idle_s(self) -> float:
        """Seconds since the last request ended; 0 while one is in flight."""
        return 0.0 if self._in_flight else time.monotonic() - self._last_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] not in ("http", "websocket"):
            return
        refusal = self._check(scope)
        if refusal is not None:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})  # before it is accepted: HTTP status 403
            else:
                await _refuse(send, *refusal)
            return
        if scope["type"] == "websocket":
            await self._connect(scope, receive, send)
            return
        # A health check must not keep an idle service running.
        counted = scope["path"] != "/health"
        self._in_flight += counted
        try:
            body = await read_body(receive, MAX_BODY_BYTES)
            # A client that disconnected before its request was complete gets no answer.
            if body is not None:
                await self._app(scope, replay_body(body, receive), send)
        except BodyTooLarge:
            await _refuse(send, *_TOO_LARGE)
        except Exception:  # noqa: BLE001 - a failed request is logged and does not affect others
            # The application has answered, or had begun to; then the server closes the connection.
            _log.exception("%s %s failed", scope["method"], scope["path"])
        finally:
            if counted:
                self._in_flight -= 1
                self._last_request = time.monotonic()

    async def _connect(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a WebSocket; the service is not idle while it is open."""
        self._in_flight += 1
        try:
            await self._app(scope, receive, send)
        except Exception:  # noqa: BLE001 - a failed connection is logged and does not affect others
            _log.exception("the connection to %s failed", scope["path"])
        finally:
            self._in_flight -= 1
            self._last_request = time.monotonic()

    def _check(self, scope: Scope) -> tuple[int, str, str] | None:
        """Status, code and text of the refusal of a request; None when it is authorised."""
        headers = dict(scope["headers"])
        if b"origin" in headers:
            # Our clients send none; browsers always add it to requests of web pages.
            return 403, "foreign_origin", "web pages are not served."
        host, server = headers.get(b"host", b"localhost").decode("latin-1"), scope.get("server")
        if not self._hosts.allows(host, server[0] if server else None):
            text = f"the service is not known as {host[:200]!r}. Start it with allowed_hosts=[NAME] to allow a name."
            return 403, "foreign_host", text
        if scope["path"] == "/health":
            return None
        if not has_token(headers.get(b"authorization", b""), self._token):
            text = (
                "the request carries no token, or a wrong one. "
                "Send Authorization: Bearer and the contents of service/token in the state directory."
            )
            return 401, "unauthorised", text
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            return _TOO_LARGE
        return None


async def _refuse(send: Send, status: int, code: str, text: str) -> None:
    error = {"code": code, "text": text, "place": "", "reason": text, "remedy": ""}
    await send_json(send, status, {"error": error}, close=True)
