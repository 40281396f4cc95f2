"""Connections to sessions: kept open, one request at a time on each, bytes in and bytes out.

A general HTTP client costs more than everything else between an agent and its session; this one does what a proxy needs
and nothing beside it. It adds no header but the framing, follows nothing, decodes nothing and repeats nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import httptools

__all__ = ["Answer", "Upstream", "UpstreamLost"]

IDLE_S = 30.0
"""Shorter than a session server waits before it hangs up, so that no request is sent into a closing connection."""
HIGH_WATER = 256 << 10
"""So much of an answer may wait for a slow client before the session is made to wait."""

Headers = Sequence[tuple[bytes, bytes]]


class UpstreamLost(Exception):
    """The connection could not be made, or broke before the answer was complete."""


class Answer(asyncio.Protocol):
    """One connection, and on it the answer to the request under way."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.idle_since = 0.0
        self.sending: asyncio.Task[None] | None = None
        """What sends the rest of the request, if that takes its time."""
        self.when_lost: Callable[[], None] | None = None
        """Told when the connection ends while nobody asks anything on it."""
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._pieces: list[bytes] = []
        self._size = 0
        self._complete = self._bodiless = self._until_end = self._reusable = False
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    @property
    def usable(self) -> bool:
        """Whether another request can be sent on this connection."""
        # A session may answer before it has heard everything; what is still to be sent would run into the next request.
        sent = self.sending is None or self.sending.done()
        return sent and self._reusable and self._complete and self._failure is None

    def begin(self, *, bodiless: bool) -> None:
        """A request follows; `bodiless` when its answer has no body whatever it says."""
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers = 0, []
        self._pieces.clear()
        self._size = 0
        self._complete = self._until_end = self._reusable = False
        self._bodiless = bodiless

    def write(self, data: bytes) -> None:
        """Send a part of the request."""
        if self._transport is not None:
            self._transport.write(data)

    async def drained(self) -> None:
        """Until the session has taken most of what was sent."""
        await self._writable.wait()

    async def head(self) -> None:
        """Until status and headers are there."""
        while not self.status:
            await self._more()

    async def piece(self) -> tuple[bytes, bool]:
        """What has come of the body since, and whether more may follow."""
        while not self._pieces and not self._complete:
            await self._more()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        if self._size > HIGH_WATER and self._transport is not None:
            self._transport.resume_reading()
        self._size = 0
        return data, not self._complete

    def fail(self, error: Exception) -> None:
        """The request cannot be brought to its end; whoever waits for the answer is told."""
        if self._failure is None:
            self._failure = error
        self._wake()

    def close(self) -> None:
        """Hang up."""
        self._reusable = False
        if self.sending is not None:
            self.sending.cancel()
        if self._transport is not None:
            self._transport.abort()

    async def _more(self) -> None:
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
        """Connected."""
        # Not every event loop derives its transports from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Bytes of the answer."""
        if self._parser is None or self._complete:
            # Nobody asked for anything: the connection is out of step, and not to be trusted with another request.
            self.fail(UpstreamLost("bytes that nobody asked for"))
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(UpstreamLost(f"not an answer ({type(error).__name__})"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side hung up, or we did."""
        self._reusable = False
        if self.when_lost is not None:
            self.when_lost()
        self._writable.set()
        if self._until_end and exc is None:
            self._complete = True
        if not self._complete:
            self.fail(UpstreamLost("the connection broke"))
        self._wake()

    def pause_writing(self) -> None:
        """The session takes its time."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._writable.set()

    def on_header(self, name: bytes, value: bytes) -> None:
        """The parser found a header."""
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The parser found the end of the headers; an interim answer (1xx) is not the answer."""
        status = self._parser.get_status_code()
        if status < 200:
            self.headers = []
            return
        self.status = status
        names = {name.lower() for name, _ in self.headers}
        framed = b"content-length" in names or b"transfer-encoding" in names or status in (204, 304)
        self._until_end = not framed
        if self._bodiless:
            # The parser takes the announced length for bytes to come; it is not asked again on this connection.
            self._complete, self._until_end = True, False
        else:
            self._reusable = framed and self._parser.should_keep_alive()
        self._wake()

    def on_body(self, body: bytes) -> None:
        """The parser found a piece of the body."""
        self._pieces.append(body)
        self._size += len(body)
        if self._size > HIGH_WATER and self._transport is not None:
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        """The parser found the end."""
        if self.status:
            self._complete = True
            self._wake()


class Upstream:
    """The connections to all sessions' servers."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, int], list[Answer]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def ask(
        self, host: str, port: int, head: bytes, body: bytes | AsyncIterator[bytes], *, chunked: bool, bodiless: bool
    ) -> Answer:
        """Send a request; returns with the head of its answer. Give the answer back with `done`."""
        answer = self._reused(host, port) or await self._connected(host, port)
        answer.begin(bodiless=bodiless)
        try:
            if isinstance(body, bytes):
                answer.write(head + body)
            else:
                answer.write(head)
                sending = asyncio.create_task(_send(answer, body, chunked=chunked))
                answer.sending = sending
                self._sending.add(sending)
                sending.add_done_callback(self._sending.discard)
            await answer.head()
        except BaseException:
            answer.close()
            raise
        return answer

    def done(self, answer: Answer, host: str, port: int) -> None:
        """The answer was read, or is no longer wanted."""
        if not answer.usable:
            answer.close()
            return
        answer.idle_since, answer.sending = time.monotonic(), None
        # Sessions come and go with addresses of their own: what they hung up must not be kept.
        answer.when_lost = lambda: self._forget(answer, host, port)
        self._idle.setdefault((host, port), []).append(answer)

    def close(self) -> None:
        """Hang up everywhere."""
        idle, self._idle = self._idle, {}
        for answers in idle.values():
            for answer in answers:
                answer.close()
        for sending in self._sending:
            sending.cancel()

    def _reused(self, host: str, port: int) -> Answer | None:
        idle = self._idle.get((host, port))
        while idle:
            answer = idle.pop()
            answer.when_lost = None
            if answer.usable and time.monotonic() - answer.idle_since < IDLE_S:
                return answer
            answer.close()
        self._idle.pop((host, port), None)
        return None

    def _forget(self, answer: Answer, host: str, port: int) -> None:
        idle = self._idle.get((host, port), [])
        if answer in idle:
            idle.remove(answer)
        if not idle:
            self._idle.pop((host, port), None)

    async def _connected(self, host: str, port: int) -> Answer:
        try:
            _, answer = await asyncio.get_running_loop().create_connection(Answer, host, port)
        except OSError as error:
            raise UpstreamLost(f"no connection ({error.strerror or error})") from None
        return answer


async def _send(answer: Answer, body: AsyncIterator[bytes], *, chunked: bool) -> None:
    """The request's body, piece by piece; a body that breaks off breaks the request off."""
    try:
        async for piece in body:
            answer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
            await answer.drained()
        if chunked:
            answer.write(b"0\r\n\r\n")
    except Exception as error:  # noqa: BLE001  whatever broke the upload belongs to whoever waits for the answer
        answer.fail(error)
        answer.close()
