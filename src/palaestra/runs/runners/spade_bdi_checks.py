"""Checks of the runner `spade-bdi` that need none of its packages: an XMPP server."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from xml.sax.saxutils import quoteattr

_MAX_ANSWER_BYTES = 4096
_STREAM = re.compile(rb"<(?:[\w.-]+:)?stream[\s>]")


def begin_stream(host: str, port: int, domain: str, timeout_s: float) -> str:
    """Begin an XMPP stream, as a client does; returns the address of the server. `OSError` if it begins none."""
    header = (
        f"<?xml version='1.0'?><stream:stream to={quoteattr(domain)} version='1.0' xmlns='jabber:client' "
        "xmlns:stream='http://etherx.jabber.org/streams'>"
    )
    deadline = time.monotonic() + timeout_s
    with socket.create_connection((host, port), timeout_s) as connection:
        address = str(connection.getpeername()[0])
        connection.sendall(header.encode())
        answer = b""
        while _STREAM.search(answer) is None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = connection.recv(_MAX_ANSWER_BYTES)
            except TimeoutError:
                raise ConnectionError(f"it began no XMPP stream within {timeout_s:g} s") from None
            answer += data
            if not data or len(answer) > _MAX_ANSWER_BYTES:
                raise ConnectionError(f"it began no XMPP stream; its answer was {answer[:60]!r}")
        with contextlib.suppress(OSError):
            connection.sendall(b"</stream:stream>")
        return address
