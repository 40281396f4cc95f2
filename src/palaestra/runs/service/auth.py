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
from palaestra.runs.service.web.access import WebAccess, add_browser_headers, is_public

_log = logging.getLogger(__name__)
MAX_BODY_BYTES = 1 << 20
_TOO_LARGE = (413, "too_large", f"the body is larger than {MAX_BODY_BYTES} bytes.")


class AuthMiddleware:
    """Passes authorised requests on to `app` and refuses all others."""

    def __init__(
        self, app: AsgiApp, token: str, hosts: AllowedHosts | None = None, access: WebAccess | None = None
    ) -> None:
        self._app, self._token = app, token.encode()
        self._access = access or WebAccess(token)
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
        if not self._has_token(scope):
            send = add_browser_headers(scope, send)
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
        host, server = headers.get(b"host", b"localhost").decode("latin-1"), scope.get("server")
        # Our clients send none. Browsers add it to requests of other pages, and to those of the web page for scripts.
        if b"origin" in headers and not _is_own_read(scope, headers[b"origin"].decode("latin-1"), host):
            return 403, "foreign_origin", "requests of other web pages are not answered."
        if not self._hosts.allows(host, server[0] if server else None):
            text = f"the service is not known as {host[:200]!r}. Start it with allowed_hosts=[NAME] to allow a name."
            return 403, "foreign_host", text
        if scope["path"] == "/health":
            return None
        is_public_read = is_public(scope["path"]) and scope.get("method") in ("GET", "HEAD")
        if not (is_public_read or self._has_token(scope) or self._access.allows(scope, headers)):
            text = (
                "the request carries no token, or a wrong one. "
                "Send Authorization: Bearer and the contents of service/token in the state directory."
            )
            return 401, "unauthorised", text
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            return _TOO_LARGE
        return None

    def _has_token(self, scope: Scope) -> bool:
        return has_token(dict(scope["headers"]).get(b"authorization", b""), self._token)


def _is_own_read(scope: Scope, origin: str, host: str) -> bool:
    """Whether a request reads on behalf of a page of this service; its `Host` is checked separately."""
    # A proxy may have added the encryption.
    return scope.get("method") in ("GET", "HEAD") and origin in (f"http://{host}", f"https://{host}")


async def _refuse(send: Send, status: int, code: str, text: str) -> None:
    error = {"code": code, "text": text, "place": "", "reason": text, "remedy": ""}
    await send_json(send, status, {"error": error}, close=True)
