"""The Chrome DevTools Protocol over a pipe: calls, events and the end of the connection.

When the browser exits, every pending call fails with `SessionFailed("browser_gone")` at once.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from palaestra.errors import SessionFailed

Call: TypeAlias = tuple[str, dict[str, Any]]
"""A method and its parameters."""


class CdpError(Exception):
    """The browser returned an error for a call."""


class CdpConnection(asyncio.Protocol):
    """One connection to one browser. It is the protocol of the pipe it reads from."""

    def __init__(self, write_fd: int, read_fd: int) -> None:
        self._write_fd, self._read_fd = write_fd, read_fd
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._callbacks: dict[str, Callable[[str, dict[str, Any]], None]] = {}
        self._closed: SessionFailed | None = None
        self._chunks: list[bytes] = []
        self._writing: asyncio.WriteTransport | None = None
        self._reading: asyncio.ReadTransport | None = None

    async def open(self) -> None:
        """Start reading."""
        loop = asyncio.get_running_loop()
        source = os.fdopen(self._read_fd, "rb", buffering=0)
        self._reading, _ = await loop.connect_read_pipe(lambda: self, source)
        target = os.fdopen(self._write_fd, "wb", buffering=0)
        self._writing, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, target)

    @property
    def is_closed(self) -> bool:
        """Whether the connection has ended."""
        return self._closed is not None

    def subscribe(self, session: str, callback: Callable[[str, dict[str, Any]], None]) -> None:
        """Call `callback(method, params)` for every event of a page's session."""
        self._callbacks[session] = callback

    def unsubscribe(self, session: str) -> None:
        """Ignore further events of a page."""
        self._callbacks.pop(session, None)

    def send(self, method: str, params: dict[str, Any] | None = None, *, session: str | None = None) -> None:
        """Send a call and ignore its response."""
        self._write(_message(next(self._numbers), method, params or {}, session))

    def start_call(
        self, method: str, params: dict[str, Any] | None = None, *, session: str | None = None
    ) -> asyncio.Future[dict[str, Any]]:
        """Send a call and return the future of its response."""
        return self.start_calls([(method, params or {})], session=session)[0]

    def start_calls(self, calls: Iterable[Call], *, session: str | None = None) -> list[asyncio.Future[dict[str, Any]]]:
        """Send calls in one write, in this order, and return the future of each response.

        A write costs as much as all other work for a call.
        """
        responses, messages = [], []
        for method, params in calls:
            response: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
            responses.append(response)
            if self._closed is not None:
                _fail(response, self._closed)
                continue
            number = next(self._numbers)
            self._pending[number] = response
            messages.append(_message(number, method, params, session))
        self._write(b"".join(messages))
        return responses

    def start_all(self, calls: Iterable[Call], *, session: str | None = None) -> asyncio.Future[list[dict[str, Any]]]:
        """Send calls in one write and return the future of all responses; it fails with the first error."""
        responses = asyncio.gather(*self.start_calls(calls, session=session))
        responses.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, as in `_fail`
        return responses

    async def call(
        self, method: str, params: dict[str, Any] | None = None, *, session: str | None = None, timeout: float = 10.0
    ) -> dict[str, Any]:
        """Send a call and wait for its response; `SessionFailed("hung")` when none arrives within `timeout` seconds."""
        response = self.start_call(method, params, session=session)
        try:
            async with asyncio.timeout(timeout):
                return await response
        except TimeoutError:
            raise SessionFailed("hung", f"the page did not respond to {method} within {timeout:g} s") from None

    async def close(self) -> None:
        """Close the pipe."""
        self._close("the browser was closed")
        for transport in (self._writing, self._reading):
            if transport is not None:
                transport.close()
        await asyncio.sleep(0)  # the transports close their descriptors in the next iteration of the loop

    def _write(self, data: bytes) -> None:
        if self._writing is not None and self._closed is None:
            self._writing.write(data)

    def data_received(self, data: bytes) -> None:
        """Split the data of the pipe into messages."""
        first, *others = data.split(b"\0")
        self._chunks.append(first)
        for rest in others:
            message = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
            self._chunks = [rest]
            self._on_message(json.loads(message.decode()))

    def connection_lost(self, exc: Exception | None) -> None:
        """The browser exited."""
        self._close("the browser is gone")

    def _on_message(self, message: dict[str, Any]) -> None:
        number = message.get("id")
        if number is None:
            callback = self._callbacks.get(message.get("sessionId", ""))
            if callback is not None:
                callback(message["method"], message.get("params", {}))
            return
        response = self._pending.pop(number, None)
        if response is None or response.done():
            return
        if "error" in message:
            _fail(response, CdpError(message["error"].get("message", "refused")))
        else:
            response.set_result(message.get("result", {}))

    def _close(self, reason: str) -> None:
        if self._closed is None:
            self._closed = SessionFailed("browser_gone", reason)
        pending, self._pending = self._pending, {}
        for response in pending.values():
            if not response.done():
                _fail(response, self._closed)
        for callback in list(self._callbacks.values()):
            callback("Palaestra.gone", {})


def _fail(response: asyncio.Future[dict[str, Any]], error: Exception) -> None:
    response.set_exception(error)
    response.exception()  # retrieved, so that asyncio does not warn when no task waits for it


def _message(number: int, method: str, params: dict[str, Any], session: str | None) -> bytes:
    message: dict[str, Any] = {"id": number, "method": method, "params": params}
    if session is not None:
        message["sessionId"] = session
    return json.dumps(message).encode() + b"\0"
