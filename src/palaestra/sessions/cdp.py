"""The Chrome DevTools Protocol over a pipe: calls that answer, events that are heard, an end that everybody learns of.

One reader, any number of callers. A call has a deadline; when the browser goes, every call that waits fails with
`SessionFailed("browser_gone")` at once. Knows nothing of pages or tasks.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from palaestra.errors import SessionFailed

__all__ = ["Call", "Cdp", "CdpError"]

Call: TypeAlias = tuple[str, dict[str, Any]]
"""A method and its parameters."""


class CdpError(Exception):
    """The browser understood the call and refused it."""


class Cdp:
    """One connection to one browser."""

    def __init__(self, to_it: int, from_it: int) -> None:
        self._to_it, self._from_it = to_it, from_it
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._missing: dict[asyncio.Future[dict[str, Any]], int] = {}
        """How many answers calls that were sent together still wait for."""
        self._listeners: dict[str, Callable[[str, dict[str, Any]], None]] = {}
        self._gone: SessionFailed | None = None
        self._pieces: list[bytes] = []
        self._writing: asyncio.WriteTransport | None = None
        self._reading: asyncio.ReadTransport | None = None

    async def open(self) -> None:
        """Begin to read."""
        loop = asyncio.get_running_loop()
        source = os.fdopen(self._from_it, "rb", buffering=0)
        self._reading, _ = await loop.connect_read_pipe(lambda: _Heard(self._heard, self._end), source)
        target = os.fdopen(self._to_it, "wb", buffering=0)
        self._writing, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, target)

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
        self._write(_message(next(self._numbers), method, params or {}, session))

    def begin(
        self, method: str, params: dict[str, Any] | None = None, *, session: str | None = None
    ) -> asyncio.Future[dict[str, Any]]:
        """Send a call and give the future of its answer, so that several can be under way."""
        return self.begin_all([(method, params or {})], session=session)

    def begin_all(self, calls: Iterable[Call], *, session: str | None = None) -> asyncio.Future[dict[str, Any]]:
        """Send calls in one go, in this order; the future of the answer that comes last.

        One write instead of several: each costs as much as everything else that is done for a call.
        """
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        listed = list(calls)
        if len(listed) > 1:
            self._missing[answer] = len(listed)
        self._send([(call, answer) for call in listed], session)
        return answer

    def begin_each(self, calls: Iterable[Call], *, session: str | None = None) -> list[asyncio.Future[dict[str, Any]]]:
        """Send calls in one go, in this order; the future of each one's answer."""
        loop = asyncio.get_running_loop()
        listed = [(call, loop.create_future()) for call in calls]
        self._send(listed, session)
        return [answer for _, answer in listed]

    def _send(self, calls: list[tuple[Call, asyncio.Future[dict[str, Any]]]], session: str | None) -> None:
        messages = []
        for (method, params), answer in calls:
            if self._gone is not None:
                self._missing.pop(answer, None)
                if not answer.done():
                    _refuse(answer, self._gone)
                continue
            number = next(self._numbers)
            self._waiting[number] = answer
            messages.append(_message(number, method, params, session))
        self._write(b"".join(messages))

    async def call(
        self, method: str, params: dict[str, Any] | None = None, *, session: str | None = None, timeout: float = 10.0
    ) -> dict[str, Any]:
        """Send a call and wait for its answer; `SessionFailed("hung")` when none comes within `timeout` seconds."""
        answer = self.begin(method, params, session=session)
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise SessionFailed("hung", f"the page did not answer {method} within {timeout:g} s") from None

    async def close(self) -> None:
        """Stop reading and let go of the pipe."""
        self._end("the browser was closed")
        for transport in (self._writing, self._reading):
            if transport is not None:
                transport.close()
        await asyncio.sleep(0)  # the transports let go of their descriptors in the loop's next turn

    def _write(self, data: bytes) -> None:
        if self._writing is not None and self._gone is None:
            self._writing.write(data)

    def _heard(self, data: bytes) -> None:
        first, *others = data.split(b"\0")
        self._pieces.append(first)
        for following in others:
            message = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces = [following]
            self._take(json.loads(message.decode()))

    def _take(self, message: dict[str, Any]) -> None:
        number = message.get("id")
        if number is None:
            hear = self._listeners.get(message.get("sessionId", ""))
            if hear is not None:
                hear(message["method"], message.get("params", {}))
            return
        answer = self._waiting.pop(number, None)
        if answer is None:
            return
        left = self._missing.pop(answer, 1) - 1
        if answer.done():
            return
        if "error" in message:
            _refuse(answer, CdpError(message["error"].get("message", "refused")))
        elif left:
            self._missing[answer] = left
        else:
            answer.set_result(message.get("result", {}))

    def _end(self, why: str) -> None:
        if self._gone is None:
            self._gone = SessionFailed("browser_gone", why)
        waiting, self._waiting = self._waiting, {}
        self._missing.clear()
        for answer in waiting.values():
            if not answer.done():
                _refuse(answer, self._gone)
        for hear in list(self._listeners.values()):
            hear("Palaestra.gone", {})


def _refuse(answer: asyncio.Future[dict[str, Any]], error: Exception) -> None:
    answer.set_exception(error)
    answer.exception()  # looked at, so that nobody is warned of an answer that nobody waits for


class _Heard(asyncio.Protocol):
    """The browser's end of the pipe."""

    def __init__(self, heard: Callable[[bytes], None], end: Callable[[str], None]) -> None:
        self._heard, self._end = heard, end

    def data_received(self, data: bytes) -> None:
        """It said something, or a part of it."""
        self._heard(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """It hung up."""
        self._end("the browser is gone")


def _message(number: int, method: str, params: dict[str, Any], session: str | None) -> bytes:
    message: dict[str, Any] = {"id": number, "method": method, "params": params}
    if session is not None:
        message["sessionId"] = session
    return json.dumps(message).encode() + b"\0"
