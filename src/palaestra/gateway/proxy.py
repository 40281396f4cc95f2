"""`ANY /proxy/{session_id}/{path}`: requests on their way to a session and its answers on their way back.

A plain ASGI application on the fast path of every act and screenshot: bodies pass through piece by piece in both
directions, nothing is decoded, and a failure of the session is told as one (502, 504), never as an answer of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import aiohttp
from yarl import URL

from palaestra.errors import EnvironmentFailed, SessionRefused
from palaestra.gateway.desk import SessionDesk
from palaestra.gateway.forwarding import request_headers, response_headers, session_and_path
from palaestra.gateway.replies import FORWARDED, Receive, Scope, Send, send_error
from palaestra.gateway.runtime import Address

__all__ = ["Proxy", "make_client"]

# Shorter than the idle time after which a session server hangs up, so that no request meets a closing connection.
_IDLE_S = 30.0
_MAX_HEADER = 64 << 10
CLIENT_LEFT = 499
"""How a request is counted whose client went away before it was complete; nobody is answered."""


def make_client() -> aiohttp.ClientSession:
    """The connections to the session servers: kept open, adding and interpreting nothing."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S, use_dns_cache=False),
        max_line_size=_MAX_HEADER, max_field_size=_MAX_HEADER,
        cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, timeout=aiohttp.ClientTimeout(),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"), trust_env=False,
    )  # fmt: skip


class _Upload:
    """A request's body, piece by piece; knows whether the client went away or sent too much."""

    def __init__(self, receive: Receive, first: bytes, limit: int) -> None:
        self._receive, self._first, self._left, self._limit = receive, first, limit, limit
        self.refused: SessionRefused | None = None
        self.complete = False

    async def pieces(self) -> AsyncIterator[bytes]:
        piece, more = self._first, True
        while True:
            self._left -= len(piece)
            if self._left < 0:
                self.refused = _too_large(self._limit)
                raise self.refused
            if piece:
                yield piece
            if not more:
                self.complete = True
                return
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ConnectionAbortedError("the client went away")
            piece, more = message.get("body", b""), message.get("more_body", False)


class Proxy:
    """Forwards to whatever session the desk says a request is for."""

    def __init__(
        self, desk: SessionDesk, client: aiohttp.ClientSession, *, timeout_s: float, max_body_bytes: int
    ) -> None:
        self._desk, self._client = desk, client
        self._timeout_s, self._max_body_bytes = timeout_s, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        begun = time.perf_counter()
        lease = None
        try:
            session_id, path = session_and_path(scope["raw_path"])
            length = self._checked(scope)
            lease, address = self._desk.begin(session_id)
            status = await self._forward(scope, receive, send, _target(address, path, scope["query_string"]), length)
        except (SessionRefused, EnvironmentFailed) as error:
            status = await send_error(send, error, close=getattr(error, "status", 0) == 413)
        finally:
            if lease is not None:
                self._desk.end(lease)
        self._desk.metrics.proxied(status, time.perf_counter() - begun)

    def _checked(self, scope: Scope) -> bytes | None:
        """The announced length of the body; refuses methods and sizes that are not forwarded."""
        if scope["method"] not in FORWARDED:
            text = f"{scope['method'][:32]} is not forwarded to sessions."
            raise SessionRefused("bad_method", text, status=405)
        length: bytes | None = next((value for name, value in scope["headers"] if name == b"content-length"), None)
        if length is not None and int(length) > self._max_body_bytes:
            raise _too_large(self._max_body_bytes)
        return length

    async def _forward(self, scope: Scope, receive: Receive, send: Send, url: URL, length: bytes | None) -> int:
        first = await receive()
        if first["type"] == "http.disconnect":
            # Half a request is no request: a session must not be asked what nobody asked to the end.
            return CLIENT_LEFT
        headers = [(name.decode("latin-1"), _text(value)) for name, value in request_headers(scope["headers"])]
        upload: _Upload | None = None
        body: bytes | AsyncIterator[bytes] | None = first.get("body") or None
        if len(first.get("body", b"")) > self._max_body_bytes:
            raise _too_large(self._max_body_bytes)
        if first.get("more_body", False):
            upload = _Upload(receive, first.get("body", b""), self._max_body_bytes)
            body = upload.pieces()
            if length is not None:
                headers.append(("content-length", length.decode("latin-1")))
        started = False
        try:
            async with asyncio.timeout(self._timeout_s):
                asked = self._client.request(scope["method"], url, headers=headers, data=body, allow_redirects=False)
                async with asked as response:
                    kept = response_headers(response.raw_headers)
                    started = True
                    await send({"type": "http.response.start", "status": response.status, "headers": kept})
                    more = True
                    while more:
                        piece = await response.content.readany()
                        more = not response.content.at_eof()
                        await send({"type": "http.response.body", "body": piece, "more_body": more})
                    return response.status
        except TimeoutError:
            text = f"the session did not answer within {self._timeout_s:g} s"
            failure: EnvironmentFailed | SessionRefused = EnvironmentFailed("session_timeout", text)
        except (aiohttp.ClientError, ConnectionError, SessionRefused) as error:
            failure = _explained(error, upload)
        if started:
            # The head is out. To end here without an end is what tells the client that something is missing.
            return 502
        raise failure


def _too_large(limit: int) -> SessionRefused:
    return SessionRefused("too_large", f"the request is too large: at most {limit} bytes are forwarded.", status=413)


def _explained(error: Exception, upload: _Upload | None) -> EnvironmentFailed | SessionRefused:
    if upload is not None and upload.refused is not None:
        return upload.refused
    detail = f"the session's server cannot be reached ({type(error).__name__})"
    return EnvironmentFailed("session_lost", detail)


def _text(value: bytes) -> str:
    """A header's value as the text that the client library turns back into the same bytes, if any does."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _target(address: Address, path: str, query: bytes) -> URL:
    text = f"{address.url}/{path}"
    return URL(f"{text}?{query.decode('latin-1')}" if query else text, encoded=True)
