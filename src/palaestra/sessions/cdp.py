"""The Chrome DevTools Protocol over a pipe: calls that answer, events that are heard, an end that everybody learns of.

One reader, any number of callers. A call has a deadline; when the browser goes, every call that waits fails with
`EnvironmentFailed("browser_gone")` at once. Knows nothing of pages or tasks.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Callable
from typing import Any

from palaestra.errors import EnvironmentFailed

__all__ = ["Cdp", "CdpError"]

MAX_MESSAGE = 256 * 2**20


class CdpError(Exception):
    """The browser understood the call and refused it."""


class Cdp:
    """One connection to one browser."""

    def __init__(self, to_it: int, from_it: int) -> None:
        self._to_it, self._from_it = to_it, from_it
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._listeners: dict[str, Callable[[str, dict[str, Any]], None]] = {}
        self._gone: EnvironmentFailed | None = None
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.ReadTransport | None = None

    async def open(self) -> None:
        """Begin to read."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=MAX_MESSAGE)
        source = os.fdopen(self._from_it, "rb", buffering=0)
        self._listening, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
        target = os.fdopen(self._to_it, "wb", buffering=0)
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, target)
        self._writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        self._reading = asyncio.create_task(self._read(reader), name="palaestra-cdp")

    @property
    def gone(self) -> bool:
        """Whether the browser is."""
        return self._gone is not None

    def listen(self, session: str, hear: Callable[[str, dict[str, Any]], None]) -> None:
        """Have `hear(method, params)` called for every event of a page's session."""
        self._listeners[session] = hear

    def ignore(self, session: str) -> None:
        """Stop listening to a page."""
        self._listeners.pop(session, None)

    def tell(self, method: str, params: dict[str, Any] | None = None, *, session: str | None = None) -> None:
        """Send a call whose answer nobody waits for."""
        self._send(next(self._numbers), method, params, session)

    def begin(
        self, method: str, params: dict[str, Any] | None = None, *, session: str | None = None
    ) -> asyncio.Future[dict[str, Any]]:
        """Send a call and give the future of its answer, so that several can be under way."""
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        if self._gone is not None:
            answer.set_exception(self._gone)
            return answer
        self._waiting[number] = answer
        self._send(number, method, params, session)
        return answer

    async def call(
        self, method: str, params: dict[str, Any] | None = None, *, session: str | None = None, timeout: float = 10.0
    ) -> dict[str, Any]:
        """Send a call and wait for its answer; `EnvironmentFailed("hung")` when none comes within `timeout` seconds."""
        answer = self.begin(method, params, session=session)
        try:
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            raise EnvironmentFailed("hung", f"the page did not answer {method} within {timeout:g} s") from None

    async def close(self) -> None:
        """Stop reading and let go of the pipe."""
        self._end("the browser was closed")
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._listening is not None:
            self._listening.close()
        await asyncio.sleep(0)  # the transports let go of their descriptors in the loop's next turn

    def _send(self, number: int, method: str, params: dict[str, Any] | None, session: str | None) -> None:
        message: dict[str, Any] = {"id": number, "method": method, "params": params or {}}
        if session is not None:
            message["sessionId"] = session
        if self._writer is None or self._gone is not None:
            return
        self._writer.write(json.dumps(message).encode() + b"\0")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                raw = await reader.readuntil(b"\0")
                self._hear(json.loads(raw[:-1]))
        except (asyncio.IncompleteReadError, ConnectionError, OSError):
            self._end("the browser is gone")

    def _hear(self, message: dict[str, Any]) -> None:
        number = message.get("id")
        if number is not None:
            answer = self._waiting.pop(number, None)
            if answer is None or answer.done():
                return
            if "error" in message:
                answer.set_exception(CdpError(message["error"].get("message", "refused")))
            else:
                answer.set_result(message.get("result", {}))
            return
        hear = self._listeners.get(message.get("sessionId", ""))
        if hear is not None:
            hear(message["method"], message.get("params", {}))

    def _end(self, why: str) -> None:
        if self._gone is None:
            self._gone = EnvironmentFailed("browser_gone", why)
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(self._gone)
                answer.exception()  # looked at, so that nobody is warned of an answer that nobody waits for
        for hear in list(self._listeners.values()):
            hear("Palaestra.gone", {})
