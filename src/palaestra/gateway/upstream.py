"""HTTP/1.1 connections from the proxy to session servers: pooled, with one request at a time on each.

A general HTTP client costs more time than all other work of the proxy. This one only does what a proxy needs: it adds
no headers, follows no redirects, decodes no bodies and retries nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import httptools

IDLE_S = 30.0
"""Seconds an idle connection is kept; less than session servers wait, so that no request meets a closing one."""
CONNECT_S = 5.0
"""Seconds to connect: a machine that is gone refuses nothing."""
HIGH_WATER = 256 << 10
"""Bytes of a response that are buffered for a slow client before reading from the session pauses."""

Headers = Sequence[tuple[bytes, bytes]]


class UpstreamError(Exception):
    """The connection could not be made, or broke before the response was complete."""

    def __init__(self, text: str, *, connected: bool = True) -> None:
        super().__init__(text)
        self.connected = connected
        """Whether there was a connection, so that the request may have arrived."""


class UpstreamConnection(asyncio.Protocol):
    """One connection and the response to its current request."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.idle_since = 0.0
        self.sending: asyncio.Task[None] | None = None
        """The task that sends a streamed request body."""
        self.on_lost: Callable[[], None] | None = None
        """Called when the connection ends while it is idle."""
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._complete = self._is_head = self._until_end = self._reusable = False
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def is_reusable(self) -> bool:
        """Whether another request can be sent on this connection."""
        # A session may respond before it has read the whole request; the rest would become part of the next one.
        sent = self.sending is None or self.sending.done()
        return sent and self._reusable and self._complete and self._failure is None

    def start_request(self, *, is_head: bool) -> None:
        """Prepare for the next request; the response to a HEAD request has no body."""
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers = 0, []
        self._chunks.clear()
        self._buffered = 0
        self._complete = self._until_end = self._reusable = False
        self._is_head = is_head

    def write(self, data: bytes) -> None:
        """Send a part of the request."""
        if self._transport is not None:
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait until the send buffer has room."""
        await self._writable.wait()

    async def wait_for_head(self) -> None:
        """Wait until status and headers have arrived."""
        while not self.status:
            await self._wait_for_data()

    async def read_chunk(self) -> tuple[bytes, bool]:
        """The part of the body that has arrived since the last call, and whether more may follow."""
        while not self._chunks and not self._complete:
            await self._wait_for_data()
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        if self._buffered > HIGH_WATER and self._transport is not None:
            self._transport.resume_reading()
        self._buffered = 0
        return data, not self._complete

    def fail(self, error: Exception) -> None:
        """Fail the current request: the task that waits for its response gets `error`."""
        if self._failure is None:
            self._failure = error
        self._wake()

    def close(self) -> None:
        """Close the connection."""
        self._reusable = False
        if self.sending is not None:
            self.sending.cancel()
        if self._transport is not None:
            self._transport.abort()

    async def _wait_for_data(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # The transports of some event loops do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        if self._parser is None or self._complete:
            # There is no request in progress: the connection is out of sync and must not be reused.
            self.fail(UpstreamError("bytes without a request"))
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(UpstreamError(f"not an HTTP response ({type(error).__name__})"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the response: complete if it was delimited by the end of the connection, else failed."""
        self._reusable = False
        if self.on_lost is not None:
            self.on_lost()
        self._writable.set()
        if self._until_end and exc is None:
            self._complete = True
        if not self._complete:
            self.fail(UpstreamError("the connection broke"))
        self._wake()

    def pause_writing(self) -> None:
        """The send buffer is full."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """The send buffer has room again."""
        self._writable.set()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser for each header."""
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Called by the parser after the headers; interim responses (1xx) are skipped."""
        status = self._parser.get_status_code()
        if status < 200:
            self.headers = []
            return
        self.status = status
        names = {name.lower() for name, _ in self.headers}
        framed = b"content-length" in names or b"transfer-encoding" in names or status in (204, 304)
        self._until_end = not framed
        if self._is_head:
            # The parser would wait for a body of the announced length, so the connection is not reused.
            self._complete, self._until_end = True, False
        else:
            self._reusable = framed and self._parser.should_keep_alive()
        self._wake()

    def on_body(self, body: bytes) -> None:
        """Called by the parser for each part of the body."""
        self._chunks.append(body)
        self._buffered += len(body)
        if self._buffered > HIGH_WATER and self._transport is not None:
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        """Called by the parser at the end of the response."""
        if self.status:
            self._complete = True
            self._wake()


class ConnectionPool:
    """The connections to all session servers."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, int], list[UpstreamConnection]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def send_request(
        self, host: str, port: int, head: bytes, body: bytes | AsyncIterator[bytes], *, chunked: bool, is_head: bool
    ) -> UpstreamConnection:
        """Send a request and wait for the head of its response. Pass the connection to `release` afterwards."""
        connection = self._take_idle(host, port) or await self._connect(host, port)
        connection.start_request(is_head=is_head)
        try:
            if isinstance(body, bytes):
                connection.write(head + body)
            else:
                connection.write(head)
                sending = asyncio.create_task(_send(connection, body, chunked=chunked))
                connection.sending = sending
                self._sending.add(sending)
                sending.add_done_callback(self._sending.discard)
            await connection.wait_for_head()
        except BaseException:
            connection.close()
            raise
        return connection

    def release(self, connection: UpstreamConnection, host: str, port: int) -> None:
        """Return a connection whose response was read or is no longer wanted."""
        if not connection.is_reusable:
            connection.close()
            return
        connection.idle_since, connection.sending = time.monotonic(), None
        # Sessions come and go, each with its own address: connections that they closed must not accumulate.
        connection.on_lost = lambda: self._forget(connection, host, port)
        self._idle.setdefault((host, port), []).append(connection)

    def close(self) -> None:
        """Close all connections."""
        idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()
        for sending in self._sending:
            sending.cancel()

    def _take_idle(self, host: str, port: int) -> UpstreamConnection | None:
        idle = self._idle.get((host, port))
        while idle:
            connection = idle.pop()
            connection.on_lost = None
            if connection.is_reusable and time.monotonic() - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        self._idle.pop((host, port), None)
        return None

    def _forget(self, connection: UpstreamConnection, host: str, port: int) -> None:
        idle = self._idle.get((host, port), [])
        if connection in idle:
            idle.remove(connection)
        if not idle:
            self._idle.pop((host, port), None)

    async def _connect(self, host: str, port: int) -> UpstreamConnection:
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await asyncio.get_running_loop().create_connection(UpstreamConnection, host, port)
        except TimeoutError:
            raise UpstreamError(f"no connection within {CONNECT_S:g} s", connected=False) from None
        except OSError as error:
            raise UpstreamError(f"no connection ({error.strerror or error})", connected=False) from None
        return connection


async def _send(connection: UpstreamConnection, body: AsyncIterator[bytes], *, chunked: bool) -> None:
    """Send a streamed request body; a body that fails fails the request."""
    try:
        async for chunk in body:
            connection.write(b"%x\r\n%s\r\n" % (len(chunk), chunk) if chunked else chunk)
            await connection.drain()
        if chunked:
            connection.write(b"0\r\n\r\n")
    except Exception as error:  # noqa: BLE001  the task that waits for the response gets the error of the upload
        connection.fail(error)
        connection.close()
