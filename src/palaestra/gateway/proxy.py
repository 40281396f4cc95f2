"""`ANY /proxy/{session_id}/{path}`: forwards requests to sessions and streams the responses back.

A plain ASGI application, because every act and screenshot passes through it. Bodies are streamed in both directions and
nothing is decoded. A failure of the session is reported as 502 or 504, never as a response of the session.

Paths are checked as the bytes that arrived, never in a decoded and re-encoded form: what two parsers could read
differently is refused instead of repaired.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.gateway.auth import CALLER, PROXY_PREFIX
from palaestra.gateway.error_responses import FORWARDED_METHODS, content_length, send_error
from palaestra.gateway.runtime import Address
from palaestra.gateway.session_service import SessionService
from palaestra.gateway.upstream import ConnectionPool, UpstreamError
from palaestra.http.asgi import Message, Receive, Scope, Send
from palaestra.sessions.wire import SESSION_TOKEN_HEADER

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer trailers "
    b"transfer-encoding upgrade".split()
)
# Tokens and cookies are not passed on; `host` names the gateway, and our own server has answered `expect`.
_NOT_FOR_SESSIONS = _HOP_BY_HOP | frozenset(
    (b"authorization", b"cookie", b"host", b"expect", b"content-length", SESSION_TOKEN_HEADER.lower().encode())
)
# A peer checks the tokens again, and only it knows the session's.
NOT_FOR_PEERS = _HOP_BY_HOP | frozenset((b"cookie", b"host", b"expect", b"content-length"))
# A page inside a session must not set cookies for the gateway's address.
_NOT_FOR_CLIENTS = _HOP_BY_HOP | frozenset((b"set-cookie", b"set-cookie2", b"server", b"date"))

_SESSION_ID = re.compile(rb"[A-Za-z0-9_-]{1,64}")
_PLAIN_PATH = re.compile(rb"[A-Za-z0-9_-]+(?:/[A-Za-z0-9_-]+)*")
_ENCODED_SEPARATOR = re.compile(rb"%(?:25)*(?:2f|5c|00)", re.IGNORECASE)
_PATH_CHARACTERS = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})+")
# The query is written into the request line, so it must not hold what ends that line.
_QUERY = re.compile(rb"[^\x00-\x20\x7f]*")
CLIENT_DISCONNECTED = 499
"""Status under which requests are counted whose client disconnected; it is never sent."""


@dataclass(frozen=True)
class Destination:
    """Where a request is forwarded to, and what its failures are called."""

    address: Address
    target: bytes
    """Path of the request line, without the query."""
    dropped: frozenset[bytes] = _NOT_FOR_SESSIONS
    """Headers that are not forwarded."""
    added: tuple[tuple[bytes, bytes], ...] = ()
    """Headers that are added."""
    subject: str = "the session"
    server: str = "the session's server"
    timeout_reason: str = "session_timeout"
    unreachable_reason: str = "session_lost"
    """No connection was made, so that nothing of the request arrived."""
    lost_reason: str = "session_lost"


class Proxy:
    """Forwards requests to the sessions of a `SessionService`."""

    def __init__(self, service: SessionService, pool: ConnectionPool, *, timeout_s: float, max_body_bytes: int) -> None:
        self._service, self._pool = service, pool
        self._timeout_s, self._max_body_bytes = timeout_s, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        started_at = time.perf_counter()
        lease = None
        try:
            session_id, path = parse_proxy_path(scope["raw_path"])
            self.check(scope)
            self._service.check_owner(session_id, scope[CALLER])
            lease, address = self._service.begin_request(session_id)
            destination = Destination(address, f"{address.prefix}/{path}".encode())
            status = await self.forward(scope, receive, send, destination)
        except (SessionRefused, SessionFailed) as error:
            status = await send_error(send, error, close=getattr(error, "status", 0) in (408, 413))
        finally:
            if lease is not None:
                self._service.end_request(lease)
        self._service.metrics.record_request(status, time.perf_counter() - started_at)

    def check(self, scope: Scope) -> None:
        """Refuse methods, queries and sizes that are not forwarded."""
        if scope["method"] not in FORWARDED_METHODS:
            text = f"{scope['method'][:32]} is not forwarded to sessions."
            raise SessionRefused("bad_method", text, status=405)
        if not _QUERY.fullmatch(scope["query_string"]):
            raise SessionRefused("bad_path", "the query has characters that are not allowed in a query.", status=400)
        length = content_length(scope)
        if length is not None and int(length) > self._max_body_bytes:
            raise _too_large(self._max_body_bytes)

    async def _receive_first(self, receive: Receive) -> Message:
        """The first part of the body; refused (408) when it does not arrive.

        A lease does not expire during a request, so a client that disappears in the middle of one must not hold it.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await receive()
        except TimeoutError:
            text = f"the request's body did not arrive within {self._timeout_s:g} s. Send it again."
            raise SessionRefused("slow_request", text, status=408) from None

    async def forward(self, scope: Scope, receive: Receive, send: Send, destination: Destination) -> int:
        """Forward a request, stream the response back, and return its status.

        `SessionFailed` or `SessionRefused` if there is no response.
        """
        address = destination.address
        first = await self._receive_first(receive)
        if first["type"] == "http.disconnect":
            # A session must not perform a request that did not arrive completely.
            return CLIENT_DISCONNECTED
        chunk: bytes = first.get("body", b"")
        if len(chunk) > self._max_body_bytes:
            raise _too_large(self._max_body_bytes)
        body: bytes | AsyncIterator[bytes] = chunk
        length = content_length(scope)
        if first.get("more_body", False):
            body = _stream_body(receive, chunk, self._max_body_bytes)
        elif chunk or length is not None:
            length = b"%d" % len(chunk)
        head = _build_head(scope, destination, length, chunked=length is None and not isinstance(body, bytes))
        started, connection = False, None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._pool.send_request(
                    address.host, address.port, head, body, chunked=length is None, is_head=scope["method"] == "HEAD"
                )
                started, more = True, True
                headers = response_headers(connection.headers)
                await send({"type": "http.response.start", "status": connection.status, "headers": headers})
                while more:
                    chunk, more = await connection.read_chunk()
                    await send({"type": "http.response.body", "body": chunk, "more_body": more})
                return connection.status
        except TimeoutError:
            text = f"{destination.subject} did not answer within {self._timeout_s:g} s"
            failure: SessionFailed | SessionRefused = SessionFailed(destination.timeout_reason, text)
        except ConnectionAbortedError:
            return CLIENT_DISCONNECTED
        except UpstreamError as error:
            reason = destination.lost_reason if error.connected else destination.unreachable_reason
            failure = SessionFailed(reason, f"{destination.server} cannot be reached: {error}")
        except SessionRefused as refusal:
            failure = refusal
        finally:
            if connection is not None:
                self._pool.release(connection, address.host, address.port)
        if started:
            # The head was sent. Returning without the last chunk tells the client that the body is incomplete.
            return 502
        raise failure


def parse_proxy_path(raw_path: bytes) -> tuple[str, str]:
    """Session id and path of `/proxy/{session_id}/{path}`; refused with 400 when it is not well-formed."""
    session_id, _, path = raw_path.removeprefix(PROXY_PREFIX).partition(b"/")
    if not session_id:
        raise _bad_path(raw_path, "names no session")
    if not _SESSION_ID.fullmatch(session_id):
        raise _bad_path(raw_path, "the session id has characters that are not allowed in an id")
    if not _PLAIN_PATH.fullmatch(path):
        _check_path(raw_path, path)
    return session_id.decode(), path.decode()


def _check_path(raw_path: bytes, path: bytes) -> None:
    if not path:
        raise _bad_path(raw_path, "names no path of the session", "Append reset, act, screenshot or progress")
    if b"://" in path or path.startswith(b"/"):
        raise _bad_path(raw_path, "holds an address, which is not forwarded to")
    if not _PATH_CHARACTERS.fullmatch(path):
        raise _bad_path(raw_path, "has characters that are not allowed in a path")
    if _ENCODED_SEPARATOR.search(path):
        raise _bad_path(raw_path, "holds an encoded separator")
    decoded = path
    # Remove every layer of percent-encoding, as a later server might.
    while decoded != (decoded := unquote_to_bytes(decoded)):
        pass
    segments = re.split(rb"[/\\]", decoded)
    if any(segment.partition(b";")[0].strip() in (b".", b"..") for segment in segments):
        raise _bad_path(raw_path, "leaves the session's path")
    if b"" in segments[:-1] or any(byte < 32 or byte == 127 for byte in decoded):
        raise _bad_path(raw_path, "has an empty segment or a control character")


def _bad_path(raw_path: bytes, reason: str, remedy: str = "Write /proxy/{session_id}/{path}") -> SessionRefused:
    shown = raw_path[:200].decode("ascii", "backslashreplace")
    return SessionRefused("bad_path", f"path = {shown!r}: {reason}. {remedy}.", status=400)


def request_headers(headers: Sequence[tuple[bytes, bytes]], dropped: frozenset[bytes] = _NOT_FOR_SESSIONS) -> Headers:
    """The headers of a request that are forwarded."""
    return _filter_headers(headers, dropped)


def response_headers(headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """The headers of a session's response that are forwarded to the client."""
    return _filter_headers(headers, _NOT_FOR_CLIENTS)


def _filter_headers(headers: Sequence[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> Headers:
    lowered = [(name.lower(), value) for name, value in headers]
    # `Connection: x-one` makes x-one hop-by-hop, too.
    listed = {part.strip().lower() for name, value in lowered if name == b"connection" for part in value.split(b",")}
    return [(name, value) for name, value in lowered if name not in dropped and name not in listed]


def _build_head(scope: Scope, destination: Destination, length: bytes | None, *, chunked: bool) -> bytes:
    query: bytes = scope["query_string"]
    target = destination.target + (b"?" + query if query else b"")
    host = f"host: {destination.address.authority}".encode()
    lines = [scope["method"].encode() + b" " + target + b" HTTP/1.1", host]
    headers = request_headers(scope["headers"], destination.dropped)
    lines += [name + b": " + value for name, value in (*headers, *destination.added)]
    if chunked:
        lines.append(b"transfer-encoding: chunked")
    elif length is not None:
        lines.append(b"content-length: " + length)
    return b"\r\n".join([*lines, b"", b""])


async def _stream_body(receive: Receive, first: bytes, limit: int) -> AsyncIterator[bytes]:
    chunk, more, left = first, True, limit
    while True:
        left -= len(chunk)
        if left < 0:
            raise _too_large(limit)
        if chunk:
            yield chunk
        if not more:
            return
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionAbortedError("the client disconnected")
        chunk, more = message.get("body", b""), message.get("more_body", False)


def _too_large(limit: int) -> SessionRefused:
    return SessionRefused("too_large", f"the request is too large: at most {limit} bytes are forwarded.", status=413)
