"""`ANY /proxy/{session_id}/{path}`: requests on their way to a session and its answers on their way back.

A plain ASGI application on the fast path of every act and screenshot: bodies pass through piece by piece in both
directions, nothing is decoded, and a failure of the session is told as one (502, 504), never as an answer of its own.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.gateway.auth import CALLER
from palaestra.gateway.desk import SessionDesk
from palaestra.gateway.error_responses import FORWARDED_METHODS, content_length, send_error
from palaestra.gateway.forwarding import request_headers, response_headers, session_and_path
from palaestra.gateway.runtime import Address
from palaestra.gateway.upstream import Upstream, UpstreamLost
from palaestra.http.asgi import Message, Receive, Scope, Send

__all__ = ["Proxy"]

# What would end the line that it is written into must not be in it.
_QUERY = re.compile(rb"[^\x00-\x20\x7f]*")
CLIENT_LEFT = 499
"""How a request is counted whose client went away before it was complete; nobody is answered."""


class Proxy:
    """Forwards to whatever session the desk says a request is for."""

    def __init__(self, desk: SessionDesk, upstream: Upstream, *, timeout_s: float, max_body_bytes: int) -> None:
        self._desk, self._upstream = desk, upstream
        self._timeout_s, self._max_body_bytes = timeout_s, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        begun = time.perf_counter()
        lease = None
        try:
            session_id, path = session_and_path(scope["raw_path"])
            self._check(scope)
            self._desk.check_owner(session_id, scope[CALLER])
            lease, address = self._desk.begin(session_id)
            status = await self._forward(scope, receive, send, address, path)
        except (SessionRefused, SessionFailed) as error:
            status = await send_error(send, error, close=getattr(error, "status", 0) in (408, 413))
        finally:
            if lease is not None:
                self._desk.end(lease)
        self._desk.metrics.proxied(status, time.perf_counter() - begun)

    def _check(self, scope: Scope) -> None:
        """Refuse methods, queries and sizes that are not forwarded."""
        if scope["method"] not in FORWARDED_METHODS:
            text = f"{scope['method'][:32]} is not forwarded to sessions."
            raise SessionRefused("bad_method", text, status=405)
        if not _QUERY.fullmatch(scope["query_string"]):
            raise SessionRefused("bad_path", "the query has characters that no query has.", status=400)
        length = content_length(scope)
        if length is not None and int(length) > self._max_body_bytes:
            raise _too_large(self._max_body_bytes)

    async def _first(self, receive: Receive) -> Message:
        """The request's body or the beginning of it; refused (408) when it does not come.

        A lease does not run out under a request, so a client that vanishes in the middle of one must not hold it.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await receive()
        except TimeoutError:
            text = f"the request's body did not come within {self._timeout_s:g} s. Send it again."
            raise SessionRefused("slow_request", text, status=408) from None

    async def _forward(self, scope: Scope, receive: Receive, send: Send, address: Address, path: str) -> int:
        first = await self._first(receive)
        if first["type"] == "http.disconnect":
            # Half a request is no request: a session must not be asked what nobody asked to the end.
            return CLIENT_LEFT
        body: bytes | AsyncIterator[bytes] = first.get("body", b"")
        if len(first.get("body", b"")) > self._max_body_bytes:
            raise _too_large(self._max_body_bytes)
        length = content_length(scope)
        if first.get("more_body", False):
            body = _upload(receive, first.get("body", b""), self._max_body_bytes)
        elif body or length is not None:
            length = b"%d" % len(first.get("body", b""))
        head = _head(scope, address, path, length, chunked=length is None and not isinstance(body, bytes))
        started, answer = False, None
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._upstream.ask(
                    address.host, address.port, head, body, chunked=length is None, bodiless=scope["method"] == "HEAD"
                )
                started, more = True, True
                kept = response_headers(answer.headers)
                await send({"type": "http.response.start", "status": answer.status, "headers": kept})
                while more:
                    piece, more = await answer.piece()
                    await send({"type": "http.response.body", "body": piece, "more_body": more})
                return answer.status
        except TimeoutError:
            text = f"the session did not answer within {self._timeout_s:g} s"
            failure: SessionFailed | SessionRefused = SessionFailed("session_timeout", text)
        except ConnectionAbortedError:
            return CLIENT_LEFT
        except UpstreamLost as error:
            failure = SessionFailed("session_lost", f"the session's server cannot be reached: {error}")
        except SessionRefused as refusal:
            failure = refusal
        finally:
            if answer is not None:
                self._upstream.done(answer, address.host, address.port)
        if started:
            # The head is out. To end here without an end is what tells the client that something is missing.
            return 502
        raise failure


def _head(scope: Scope, address: Address, path: str, length: bytes | None, *, chunked: bool) -> bytes:
    """The head of the request as the session gets it."""
    query: bytes = scope["query_string"]
    target = f"{address.prefix}/{path}".encode() + (b"?" + query if query else b"")
    lines = [scope["method"].encode() + b" " + target + b" HTTP/1.1", f"host: {address.authority}".encode()]
    lines += [name + b": " + value for name, value in request_headers(scope["headers"])]
    if chunked:
        lines.append(b"transfer-encoding: chunked")
    elif length is not None:
        lines.append(b"content-length: " + length)
    return b"\r\n".join([*lines, b"", b""])


async def _upload(receive: Receive, first: bytes, limit: int) -> AsyncIterator[bytes]:
    """A request's body, piece by piece."""
    piece, more, left = first, True, limit
    while True:
        left -= len(piece)
        if left < 0:
            raise _too_large(limit)
        if piece:
            yield piece
        if not more:
            return
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionAbortedError("the client went away")
        piece, more = message.get("body", b""), message.get("more_body", False)


def _too_large(limit: int) -> SessionRefused:
    return SessionRefused("too_large", f"the request is too large: at most {limit} bytes are forwarded.", status=413)
