"""Authentication: the outermost ASGI layer of the gateway, which checks tokens and routes to the proxy or the API."""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.gateway.error_responses import content_length, send_error
from palaestra.http.asgi import AsgiApp, BodyTooLarge, Receive, Scope, Send, has_token, read_body, replay_body
from palaestra.sessions.wire import SESSION_TOKEN_HEADER

CALLER = "palaestra.caller"
"""Key of the `Caller` in the ASGI scope of an authorised request."""

PROXY_PREFIX = b"/proxy/"
MAX_CONTROL_BYTES = 64 << 10
_SESSION_TOKEN = SESSION_TOKEN_HEADER.lower().encode()
_WEB_PAGE = (b"cross-site", b"same-site")
"""Values of `Sec-Fetch-Site` in requests from pages of another origin, which may come without an `Origin`."""
_LOOPBACK = re.compile(rb"(?:localhost|127\.\d+\.\d+\.\d+|\[::1\])(?::\d+)?", re.IGNORECASE)


ForwardForeign: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[bool]]
"""Forwards an authorised request about a session of another gateway; returns whether it was one."""


@dataclass(frozen=True)
class Caller:
    """An operator may use every session; a client may use the sessions whose tokens it has."""

    operator: bool
    session_token: bytes = field(default=b"", repr=False)
    """The session token that the request carries."""

    def may_use(self, session_token: str) -> bool:
        """Whether a session with this token may be used, renewed and closed."""
        # Constant time, so that the duration does not reveal how much of a guess is right.
        return self.operator or hmac.compare_digest(self.session_token, session_token.encode())


def authorise(headers: list[tuple[bytes, bytes]], token: bytes | None, operator: bytes | None = None) -> Caller:
    """The caller of a request; `SessionRefused` (401, 403) for a request that is not authorised.

    Without a token the remaining danger is a web page in a browser on this machine, which may send requests to any
    address. Such requests have an `Origin`, a cross-site `Sec-Fetch-Site`, or a `Host` that is not this machine's.
    """
    given = dict(headers)
    if token is None:
        from_web_page = b"origin" in given or given.get(b"sec-fetch-site") in _WEB_PAGE
        if from_web_page or not _LOOPBACK.fullmatch(given.get(b"host", b"localhost")):
            text = "without a token only programs on this machine are served, not web pages."
            raise SessionRefused("foreign_origin", text, status=403)
        return Caller(operator=True)
    authorization = given.get(b"authorization", b"")
    is_operator = operator is not None and has_token(authorization, operator)
    if not has_token(authorization, token) and not is_operator:
        text = "the request carries no token, or a wrong one. Send Authorization: Bearer <token>."
        raise SessionRefused("unauthorised", text, status=401)
    return Caller(is_operator, given.get(_SESSION_TOKEN, b""))


class GatewayApp:
    """Authorises each request and passes it to a peer, the proxy or the API."""

    def __init__(
        self,
        proxy: AsgiApp,
        api: AsgiApp,
        token: str | None,
        operator_token: str | None = None,
        forward_foreign: ForwardForeign | None = None,
    ) -> None:
        self._proxy, self._api, self._forward_foreign = proxy, api, forward_foreign
        self._token = None if token is None else token.encode()
        self._operator = None if operator_token is None else operator_token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return
        try:
            if scope["path"] != "/health":
                scope[CALLER] = authorise(scope["headers"], self._token, self._operator)
            if self._forward_foreign is not None and await self._forward_foreign(scope, receive, send):
                return
            if scope["raw_path"].startswith(PROXY_PREFIX):
                await self._proxy(scope, receive, send)
                return
            # An announced length is checked before any of the body arrives.
            if int(content_length(scope) or 0) > MAX_CONTROL_BYTES:
                raise BodyTooLarge
            body = await read_body(receive, MAX_CONTROL_BYTES)
        except (SessionRefused, SessionFailed) as error:
            await send_error(send, error, close=True)
            return
        except BodyTooLarge:
            text = f"the request is larger than {MAX_CONTROL_BYTES} bytes."
            await send_error(send, SessionRefused("too_large", text, status=413), close=True)
            return
        # A client that disconnected before its request was complete gets no answer.
        if body is not None:
            await self._api(scope, replay_body(body, receive), send)
