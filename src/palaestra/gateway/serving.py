"""The gateway put together and kept running: the only place that knows all its parts.

SIGTERM drains: nothing new is opened, running sessions may finish within the grace, then everything is closed. A second
SIGTERM, or SIGINT, skips the grace.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial

import aiohttp

from palaestra.gateway.api import build_api
from palaestra.gateway.auth import GatewayApp
from palaestra.gateway.config import GatewayConfig, read_operator_token, read_token
from palaestra.gateway.desk import SessionDesk
from palaestra.gateway.local import LocalRuntime, Patience, make_client
from palaestra.gateway.pods.manifest import read_manifests
from palaestra.gateway.pods.runtime import KubernetesRuntime
from palaestra.gateway.proxy import Proxy
from palaestra.gateway.runtime import Runtime
from palaestra.gateway.upstream import Upstream
from palaestra.http.server import listen, serve_in_background, socket_url
from palaestra.sessions.event_loop import loop_factory

__all__ = ["Gateway", "open_gateway", "run_gateway"]


@dataclass(frozen=True)
class Gateway:
    """A running gateway: what answers, and what it is about."""

    app: GatewayApp
    desk: SessionDesk


@contextlib.asynccontextmanager
async def open_gateway(
    config: GatewayConfig, *, token: str | None, operator_token: str | None = None, runtime: Runtime | None = None
) -> AsyncIterator[Gateway]:
    """A gateway without its port, for whoever serves it; everything it started is gone when the block ends."""
    async with make_client() as client:
        desk = SessionDesk(
            runtime or _runtime(config, client), limit=config.max_sessions, new_id=lambda: secrets.token_hex(16)
        )
        upstream = Upstream()
        proxy = Proxy(desk, upstream, timeout_s=config.request_timeout_s, max_body_bytes=config.max_body_bytes)
        try:
            await desk.start()
            yield Gateway(GatewayApp(proxy, build_api(desk, config), token, operator_token), desk)
        finally:
            await desk.stop()
            upstream.close()


def _runtime(config: GatewayConfig, client: aiohttp.ClientSession) -> Runtime:
    """What the configuration says carries sessions."""
    if config.runtime == "kubernetes":
        manifests = read_manifests(config.kubernetes)
        return KubernetesRuntime(config.kubernetes, manifests, warm=config.warm, environment=os.environ)
    return LocalRuntime(
        config.server_command, client, config.state_dir, secrets.token_hex(8), servers=config.servers, warm=config.warm,
        session_types=config.session_types, patience=Patience(start_s=config.server_start_s),
    )  # fmt: skip


async def run_gateway(
    config: GatewayConfig, environment: MutableMapping[str, str], *, told: Callable[[Mapping[str, object]], None]
) -> None:
    """Serve until told to stop; `told` hears where, as soon as requests are answered."""
    token = read_token(config, environment)
    operator_token = read_operator_token(config, environment, token)
    with listen(config.host, config.port, "gateway.port") as sock:
        async with (
            open_gateway(config, token=token, operator_token=operator_token) as gateway,
            serve_in_background(gateway.app, sock) as serving,
            _stop_asked(config) as stop,
        ):
            port = sock.getsockname()[1]
            told({"url": socket_url(config.host, sock), "port": port, "token": token is not None})
            stopping = asyncio.create_task(_drained(gateway.desk, stop, config.drain_s))
            assert gateway.desk.reaper is not None
            await asyncio.wait((stopping, serving, gateway.desk.reaper), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if gateway.desk.reaper.done():
                gateway.desk.reaper.result()


@dataclass(frozen=True)
class _Stop:
    """What signals have asked for."""

    asked: asyncio.Event
    at_once: asyncio.Event


@contextlib.asynccontextmanager
async def _stop_asked(config: GatewayConfig) -> AsyncIterator[_Stop]:
    """Listens to signals, and to standard input if its end is one."""
    loop = asyncio.get_running_loop()
    stop = _Stop(asyncio.Event(), asyncio.Event())

    def terminated() -> None:
        (stop.at_once if stop.asked.is_set() else stop.asked).set()

    def interrupted() -> None:
        stop.asked.set()
        stop.at_once.set()

    def spoken() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            interrupted()

    loop.add_signal_handler(signal.SIGTERM, terminated)
    loop.add_signal_handler(signal.SIGINT, interrupted)
    if config.stop_with_stdin:
        loop.add_reader(0, spoken)
    try:
        yield stop
    finally:
        loop.remove_reader(0)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _drained(desk: SessionDesk, stop: _Stop, grace_s: float) -> None:
    """Returns when the gateway is to end."""
    await stop.asked.wait()
    draining = asyncio.create_task(desk.drain(grace_s))
    hurry = asyncio.create_task(stop.at_once.wait())
    await asyncio.wait((draining, hurry), return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, hurry):
        task.cancel()


def announce(facts: Mapping[str, object], *, people: bool = True) -> None:
    """A line for people on standard error, and one for programs on standard output."""
    if people:
        guarded = "a token is required" if facts["token"] else "no token is required"
        sys.stderr.write(f"palaestra gateway listens on {facts['url']} ({guarded})\n")
        sys.stderr.flush()
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def serve(config: GatewayConfig) -> None:
    """Serve on this thread until a signal ends it."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        # One that ends with its standard input was started by a program, whose display it would disturb.
        told = partial(announce, people=not config.stop_with_stdin)
        runner.run(run_gateway(config, os.environ, told=told))
