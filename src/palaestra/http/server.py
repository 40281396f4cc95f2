"""Shared HTTP server parts of the session server, the gateway and the run service. Needs uvicorn."""

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

SHUTDOWN_TIMEOUT_S = 5
"""Seconds that running requests may take after shutdown began."""

MAX_WEBSOCKET_MESSAGE_BYTES = 1 << 16
"""Longest message that a client may send."""

KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that no request is sent on a connection that is being closed."""


class SignalFreeServer(uvicorn.Server):
    """A uvicorn server that leaves signals to its caller, which stops the server after other cleanup."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


def listen(host: str, port: int, place: str) -> socket.socket:
    """Open a listening socket; `ConfigError` about `place`, or about the host next to it, if that fails."""
    # Explicitly TCP: otherwise asyncio leaves Nagle's algorithm on, which adds 40 ms per response.
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
    """The URL of a listening socket."""
    authority = f"[{host}]" if ":" in host else host
    return f"http://{authority}:{sock.getsockname()[1]}"


def build_server(app: Any, **settings: Any) -> SignalFreeServer:
    """A server for `app`; `settings` are those of uvicorn that differ from ours."""
    ours = {
        "http": "httptools",
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "timeout_graceful_shutdown": SHUTDOWN_TIMEOUT_S,
        "timeout_keep_alive": KEEP_ALIVE_S,
    }
    return SignalFreeServer(uvicorn.Config(app, **(ours | settings)))


@contextlib.asynccontextmanager
async def serve_in_background(
    app: Any, sock: socket.socket, *, websockets: bool = False
) -> AsyncIterator[asyncio.Task[None]]:
    """Serve `app` on a socket inside the block; the task that it yields ends only if the server fails."""
    options = {
        "ws": "websockets-sansio",
        "ws_max_size": MAX_WEBSOCKET_MESSAGE_BYTES,
        "ws_per_message_deflate": False,
    }
    server = build_server(app, **(options if websockets else {}))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        yield serving
    finally:
        server.should_exit = True
        await serving
