"""Server-sent events of the run service: read in order, continued after a lost connection, ended from any thread."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from palaestra.errors import ServiceUnreachable

_T = TypeVar("_T")
_ATTEMPTS = 5
OpenStream: TypeAlias = Callable[[str], tuple[http.client.HTTPConnection, http.client.HTTPResponse]]
"""Sends the request that continues after an id."""


class ServerEvent(NamedTuple):
    """One event of a stream."""

    id: str
    kind: str
    data: str


class ServerEvents(Generic[_T]):
    """An iterator over a stream; `convert` makes a value of each event. Raises `ServiceUnreachable` if it breaks.

    A stream that cannot continue (`resumes=False`) ends with the first lost connection.
    """

    def __init__(
        self, open_stream: OpenStream, convert: Callable[[ServerEvent], _T], last_id: str = "", *, resumes: bool = True
    ) -> None:
        self._open, self._convert, self._last_id = open_stream, convert, last_id
        self._attempts = _ATTEMPTS if resumes else 1
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[_T]:
        """The events until the stream ends or is closed."""
        failures = 0
        while failures < self._attempts and not self._closed.is_set():
            try:
                connection, response = self._open(self._last_id)
            except ServiceUnreachable:
                failures += 1
                if failures >= self._attempts and not self._closed.is_set():
                    raise
                time.sleep(0.2 * failures)
                continue
            try:
                with self._lock:
                    self._socket = connection.sock
                for event in read_events(response):
                    failures = 0
                    if self._closed.is_set() or event.kind == "end":
                        return
                    self._last_id = event.id or self._last_id
                    yield self._convert(event)
            except (OSError, http.client.HTTPException, ValueError):
                if self._closed.is_set():
                    return
            finally:
                with self._lock:
                    self._socket = None
                connection.close()
            failures += 1
            time.sleep(0.05)
        if not self._closed.is_set():
            raise ServiceUnreachable(f"the stream broke {self._attempts} times")

    def close(self) -> None:
        """End the stream; a thread that waits for the next event returns at once."""
        self._closed.set()
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> ServerEvents[_T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self.close()


def read_events(response: http.client.HTTPResponse) -> Iterator[ServerEvent]:
    """The events of one connection."""
    event_id, kind, data = "", "", ""
    while line := response.readline():
        text = line.decode("utf-8").rstrip("\n")
        name, _, value = text.partition(": ")
        if not text:
            if data:
                yield ServerEvent(event_id, kind, data)
            event_id, kind, data = "", "", ""
        elif name == "id":
            event_id = value
        elif name == "event":
            kind = value
        elif name == "data":
            data += value
