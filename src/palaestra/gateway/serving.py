"""Builds a gateway from its configuration and runs it until it is told to stop.

SIGTERM drains: no sessions are opened, open ones may finish within `drain_s`, then everything is closed. A second
SIGTERM, or SIGINT, skips the wait.
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
from palaestra.gateway.external.lease_journal import LeaseJournal
from palaestra.gateway.external.runtime import ExternalRuntime
from palaestra.gateway.local.orphans import check_private
from palaestra.gateway.local.runtime import LocalRuntime, Timeouts, make_client
from palaestra.gateway.peers import Peers
from palaestra.gateway.pods.manifest import read_manifests
from palaestra.gateway.pods.runtime import KubernetesRuntime
from palaestra.gateway.proxy import Proxy
from palaestra.gateway.runtime import Runtime
from palaestra.gateway.session_service import SessionService
from palaestra.gateway.upstream import ConnectionPool
from palaestra.http.server import listen, loop_factory, serve_in_background, socket_url


@dataclass(frozen=True)
class Gateway:
    """A running gateway: its ASGI application, its session service and its peers."""

    app: GatewayApp
    service: SessionService
    peers: Peers


@contextlib.asynccontextmanager
async def open_gateway(
    config: GatewayConfig, *, token: str | None, operator_token: str | None = None, runtime: Runtime | None = None
) -> AsyncIterator[Gateway]:
    """A gateway without a port; everything it started is stopped when the block ends."""
    async with make_client() as client:
        runtime = runtime or _build_runtime(config, client)
        journal = _open_journal(config)
        service = SessionService(
            runtime, limit=config.max_sessions, new_id=partial(_new_session_id, config.name), journal=journal
        )
        pool = ConnectionPool()
        proxy = Proxy(service, pool, timeout_s=config.request_timeout_s, max_body_bytes=config.max_body_bytes)
        peers = Peers(config.name or "", config.peers, client, proxy, open_s=config.server_start_s)
        forward = peers.forward_foreign if config.peers else None
        try:
            await service.start()
            api = build_api(service, config, peers)
            yield Gateway(GatewayApp(proxy, api, token, operator_token, forward), service, peers)
        finally:
            await service.stop()
            pool.close()
            if journal is not None:
                journal.close(keep=config.keep_sessions)


def _new_session_id(name: str | None) -> str:
    """Begins with the name of the gateway, by which a load balancer or a peer finds it."""
    number = secrets.token_hex(16)
    return number if name is None else f"{name}-{number}"


def _open_journal(config: GatewayConfig) -> LeaseJournal | None:
    """The leases on disk, for sessions that outlive the gateway."""
    if config.runtime != "servers" or config.name is None:
        return None
    check_private(config.state_dir)
    return LeaseJournal(config.state_dir, config.name)


def _build_runtime(config: GatewayConfig, client: aiohttp.ClientSession) -> Runtime:
    if config.runtime == "kubernetes":
        manifests = read_manifests(config.kubernetes)
        return KubernetesRuntime(config.kubernetes, manifests, warm=config.warm, environment=os.environ)
    if config.runtime == "servers":
        name = config.name or ""
        return ExternalRuntime(config.session_servers, client, name, keep_sessions=config.keep_sessions)
    return LocalRuntime(
        config.server_command,
        client,
        config.state_dir,
        secrets.token_hex(8),
        servers=config.servers,
        warm=config.warm,
        session_types=config.session_types,
        timeouts=Timeouts(start_s=config.server_start_s),
    )


async def run_gateway(
    config: GatewayConfig, environment: MutableMapping[str, str], *, on_ready: Callable[[Mapping[str, object]], None]
) -> None:
    """Serve until told to stop; `on_ready` is called with URL and port when requests are answered."""
    token = read_token(config, environment)
    operator_token = read_operator_token(config, environment, token)
    with listen(config.host, config.port, "gateway.port") as sock:
        async with (
            open_gateway(config, token=token, operator_token=operator_token) as gateway,
            serve_in_background(gateway.app, sock) as serving,
            _watch_for_stop(config) as stop,
        ):
            port = sock.getsockname()[1]
            on_ready({"url": socket_url(config.host, sock), "port": port, "token": token is not None})
            drain_s = 0.0 if config.keep_sessions else config.drain_s
            stopping = asyncio.create_task(_wait_and_drain(gateway.service, stop, drain_s))
            assert gateway.service.reaper is not None
            await asyncio.wait((stopping, serving, gateway.service.reaper), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if gateway.service.reaper.done():
                gateway.service.reaper.result()


@dataclass(frozen=True)
class _StopRequest:
    requested: asyncio.Event
    immediate: asyncio.Event


@contextlib.asynccontextmanager
async def _watch_for_stop(config: GatewayConfig) -> AsyncIterator[_StopRequest]:
    """Watch for signals and, with `stop_with_stdin`, for the end of standard input."""
    loop = asyncio.get_running_loop()
    stop = _StopRequest(asyncio.Event(), asyncio.Event())

    def on_sigterm() -> None:
        (stop.immediate if stop.requested.is_set() else stop.requested).set()

    def on_sigint() -> None:
        stop.requested.set()
        stop.immediate.set()

    def on_stdin() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            on_sigint()

    loop.add_signal_handler(signal.SIGTERM, on_sigterm)
    loop.add_signal_handler(signal.SIGINT, on_sigint)
    if config.stop_with_stdin:
        loop.add_reader(0, on_stdin)
    try:
        yield stop
    finally:
        loop.remove_reader(0)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _wait_and_drain(service: SessionService, stop: _StopRequest, grace_s: float) -> None:
    """Wait until the gateway is told to stop, then drain it."""
    await stop.requested.wait()
    draining = asyncio.create_task(service.drain(grace_s))
    immediate = asyncio.create_task(stop.immediate.wait())
    await asyncio.wait((draining, immediate), return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, immediate):
        task.cancel()


def announce(status: Mapping[str, object], *, human: bool = True) -> None:
    """Print a line of JSON to standard output and, with `human`, a sentence to standard error."""
    if human:
        token = "a token is required" if status["token"] else "no token is required"
        sys.stderr.write(f"palaestra gateway listens on {status['url']} ({token})\n")
        sys.stderr.flush()
    sys.stdout.write(json.dumps(status) + "\n")
    sys.stdout.flush()


def serve(config: GatewayConfig) -> None:
    """Serve on this thread until a signal stops it."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        # With stop_with_stdin a program started the gateway, and the sentence would disturb its display.
        on_ready = partial(announce, human=not config.stop_with_stdin)
        runner.run(run_gateway(config, os.environ, on_ready=on_ready))
