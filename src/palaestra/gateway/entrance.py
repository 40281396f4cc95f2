"""Who comes in: the token, and which half of the gateway a request is for. The outermost ASGI application."""

from __future__ import annotations

import hmac
import re

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.gateway.caller import CALLER, Caller
from palaestra.gateway.forwarding import PREFIX
from palaestra.gateway.replies import Asgi, Message, Receive, Scope, Send, read_body, send_error
from palaestra.sessions.wire import SESSION_TOKEN_HEADER

__all__ = ["Entrance", "authorise"]

MAX_CONTROL_BYTES = 64 << 10
_SESSION_TOKEN = SESSION_TOKEN_HEADER.lower().encode()
_READ = (b"authorization", b"origin", b"host", b"sec-fetch-site", _SESSION_TOKEN)
_WEB_PAGE = (b"cross-site", b"same-site")
"""Values of `Sec-Fetch-Site` in requests from pages of another origin, which may come without an `Origin`."""
_LOOPBACK = re.compile(rb"(?:localhost|127\.\d+\.\d+\.\d+|\[::1\])(?::\d+)?", re.IGNORECASE)


def authorise(headers: list[tuple[bytes, bytes]], token: bytes | None, operator: bytes | None = None) -> Caller:
    """The caller of a request; `SessionRefused` (401, 403) for a request that is not authorised.

    Without a token the one danger is a web page in a browser on this machine, which may send requests to any address:
    it gives itself away by its `Origin`, by `Sec-Fetch-Site`, or by a `Host` that is not this machine's.
    """
    found = {name: value for name, value in headers if name in _READ}
    if token is None:
        from_a_page = b"origin" in found or found.get(b"sec-fetch-site") in _WEB_PAGE
        if from_a_page or not _LOOPBACK.fullmatch(found.get(b"host", b"localhost")):
            text = "without a token only programs on this machine are served, not web pages."
            raise SessionRefused("foreign_origin", text, status=403)
        return Caller(operator=True)
    scheme, _, given = found.get(b"authorization", b"").partition(b" ")
    # Compared in full whatever the first bytes are, so that the time taken tells nothing.
    is_client = hmac.compare_digest(given.strip(), token)
    is_operator = operator is not None and hmac.compare_digest(given.strip(), operator)
    if not (is_client or is_operator) or scheme.lower() != b"bearer":
        text = "the request carries no token, or a wrong one. Send Authorization: Bearer <token>."
        raise SessionRefused("unauthorised", text, status=401)
    return Caller(is_operator, found.get(_SESSION_TOKEN, b""))


class Entrance:
    """Lets requests in and shows them where to go."""

    def __init__(self, proxy: Asgi, api: Asgi, token: str | None, operator_token: str | None = None) -> None:
        self._proxy, self._api = proxy, api
        self._token = None if token is None else token.encode()
        self._operator = None if operator_token is None else operator_token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        try:
            if path != "/health":
                scope[CALLER] = authorise(scope["headers"], self._token, self._operator)
            if scope["raw_path"].startswith(PREFIX):
                await self._proxy(scope, receive, send)
                return
            body = await read_body(scope, receive, MAX_CONTROL_BYTES)
        except (SessionRefused, SessionFailed) as error:
            await send_error(send, error, close=True)
            return
        # Half a request is no request, even if what came of it makes sense.
        if body is not None:
            await self._api(scope, _replayed(body, receive), send)


def _replayed(body: bytes, receive: Receive) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
