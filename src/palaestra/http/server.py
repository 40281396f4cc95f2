"""A port that answers HTTP, for every server of ours: session server, gateway, run service.

Needs uvicorn, which only those who serve have installed; nobody else imports it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from importlib import import_module
from typing import Any

import uvicorn

from palaestra.errors import ConfigError

__all__ = ["KEEP_ALIVE_S", "SignalFreeServer", "listen", "loop_factory", "serve_in_background", "socket_url"]

LAST_ANSWERS_S = 5
"""How long answers that are under way may take once everything is closed."""

KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection, so that no request is sent into one that the server is closing."""


class SignalFreeServer(uvicorn.Server):
    """Leaves signals to whoever runs it: the original would stop listening before what runs is done."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def listen(host: str, port: int, place: str) -> socket.socket:
    """The socket, before anything is started; `ConfigError` about `place`, or the host beside it, when it cannot be."""
    # Named as TCP, or asyncio takes it for something else and leaves Nagle's algorithm on: 40 ms an answer.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(1024)
    except (OSError, OverflowError) as error:
        sock.close()
        reason = f"cannot listen there ({getattr(error, 'strerror', None) or error})"
        if isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
            where = f"{place.rpartition('.')[0]}.host"
            remedy = "Give a name or an address of this machine, such as 127.0.0.1"
            raise ConfigError(where, host, reason, remedy) from None
        raise ConfigError(place, f"{host}:{port}", reason, "Choose another port, or 0 for a free one") from None
    sock.setblocking(False)
    return sock


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The factory of uvloop's event loop where it is installed, which is faster; None for asyncio's own."""
    try:
        factory: Callable[[], asyncio.AbstractEventLoop] = import_module("uvloop").new_event_loop
    except ImportError:
        return None
    return factory


def socket_url(host: str, sock: socket.socket) -> str:
    """Where a socket is found."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{sock.getsockname()[1]}"


@contextlib.asynccontextmanager
async def serve_in_background(app: Any, sock: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
    """Answer requests at a socket while the block lasts; what it gives ends only if the server breaks."""
    settings = uvicorn.Config(
        app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
        timeout_graceful_shutdown=LAST_ANSWERS_S, timeout_keep_alive=KEEP_ALIVE_S,
    )  # fmt: skip
    server = SignalFreeServer(settings)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield serving
    finally:
        server.should_exit = True
        await serving
