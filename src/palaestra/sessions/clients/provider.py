"""`SessionProvider` opens the sessions of a run, through a gateway or on session servers.

Before a run exists, `find_sessions` checks the gateway or the servers of the configuration, or starts a gateway as a
child process, and `load_tasks` loads every task once. `open_provider` then opens one session per episode, with the JSON
protocol or the query-string dialect. The gateway that is started here exits with this process, because it watches its
standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
import select
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from palaestra.errors import ConfigError, SessionFailed, SessionRefused
from palaestra.sessions.clients.client import RESTART_S, GatewayClient, RetryPolicy, open_session
from palaestra.sessions.clients.query_dialect import QueryDialectSession, assign_rows
from palaestra.sessions.environment_config import EnvironmentConfig
from palaestra.sessions.session import Session
from palaestra.sessions.task import TaskRequest, TaskSpec

ACTORS_PER_SERVER = 8
PING_S = 10.0
TOKEN_VARIABLE = "PALAESTRA_GATEWAY_TOKEN"
START_TIMEOUT_S, STOP_TIMEOUT_S = 60.0, 15.0
NICENESS = 10
"""Niceness of a gateway that is started here and of its browsers, which yield to the training process."""
CONCURRENT_LOADS = 4
TEMPORARY_REFUSALS = ("no_session", "no_room", "draining")
"""Refusals that are temporary and do not concern the task."""


@dataclass(frozen=True)
class GatewayAddress:
    """The URL of a gateway, and the token it requires."""

    url: str
    token: str | None
    is_own: bool = False
    """Whether this process started it, so that it will not be started again when it is gone."""

    @property
    def description(self) -> str:
        """The subject of a sentence about it."""
        return f"The gateway at {self.url}"


@dataclass(frozen=True)
class ServerAddresses:
    """Running session servers without a gateway."""

    urls: tuple[str, ...]
    token: str | None

    @property
    def description(self) -> str:
        """The subject of a sentence about them."""
        return f"The session server{'s' if len(self.urls) > 1 else ''} at {', '.join(self.urls)}"


SessionAddress: TypeAlias = GatewayAddress | ServerAddresses


class SessionProvider(Protocol):
    """Opens sessions, one per episode."""

    async def open(self) -> Session:
        """Open a session for one episode; the caller closes it."""

    async def close(self) -> None:
        """Close every session that is still open."""


def find_sessions(
    environment: EnvironmentConfig, stack: ExitStack, *, actors: int, session_type: str
) -> SessionAddress:
    """The gateway or the session servers that `environment` names; else start a gateway, until the stack is closed."""
    if environment.session_servers:
        # The environment variable holds a gateway's token, which other servers must not get.
        token = _read_token(environment.token_file) if environment.token_file is not None else None
        for url in environment.session_servers:
            _check_server(url, token, environment.dialect)
        return ServerAddresses(environment.session_servers, token)
    if environment.url is not None:
        return check_gateway(environment.url, environment.token_file)
    servers = environment.servers or min(os.cpu_count() or 1, math.ceil(actors / ACTORS_PER_SERVER))
    gateway = start_gateway(max_sessions=actors + 4, servers=servers, session_types=(session_type,))
    return stack.enter_context(gateway)


def open_provider(environment: EnvironmentConfig, address: SessionAddress, *, session_type: str) -> SessionProvider:
    """A provider of sessions from this address."""
    if isinstance(address, GatewayAddress):
        return _GatewaySessions(environment, address, session_type)
    if environment.dialect == "query":
        return _QueryServers(address, environment.act_delay_s)
    return _ServerSessions(address)


def load_tasks(
    requests: Sequence[TaskRequest],
    environment: EnvironmentConfig,
    address: SessionAddress,
    *,
    session_type: str,
    actors: int,
) -> list[TaskSpec]:
    """Load each task once, so that an unknown name is found before a run exists.

    Raises `ConfigError` for the first that cannot be loaded. A task for which no session was available is left out.
    """

    async def load_all() -> list[TaskSpec | ConfigError | None]:
        provider = open_provider(environment, address, session_type=session_type)
        slots = asyncio.Semaphore(min(CONCURRENT_LOADS, actors))
        try:
            loads = (_load_task(provider, slots, number, request) for number, request in enumerate(requests))
            return await asyncio.gather(*loads)
        finally:
            await provider.close()

    with asyncio.Runner() as runner:
        results = runner.run(load_all())
    for result in results:
        if isinstance(result, ConfigError):
            raise result
    return [result for result in results if isinstance(result, TaskSpec)]


async def _load_task(
    provider: SessionProvider, slots: asyncio.Semaphore, number: int, request: TaskRequest
) -> TaskSpec | ConfigError | None:
    place = f"tasks[{number}].task"
    try:
        async with slots:
            session = await provider.open()
            try:
                return await session.reset(request)
            finally:
                await session.close()
    except SessionRefused as refusal:
        if refusal.code in TEMPORARY_REFUSALS:
            return None
        reason, _, remedy = str(refusal).removeprefix(f"task = {request.task!r}: ").partition(". ")
        return ConfigError(place, request.task, reason.rstrip("."), remedy)
    except SessionFailed as failure:
        remedy = f"Try it by hand: palaestra sessions try {request.task}"
        return ConfigError(place, request.task, f"does not load ({str(failure).rstrip('.')})", remedy)


class _GatewaySessions:
    """Sessions through a gateway."""

    def __init__(self, environment: EnvironmentConfig, address: GatewayAddress, session_type: str) -> None:
        retry = RetryPolicy(reconnect_s=0.0 if address.is_own else RESTART_S)
        self._client, self._token = GatewayClient(address.url, token=address.token, retry=retry), address.token
        self._session_type, self._environment = session_type, environment

    async def open(self) -> Session:
        leased = await self._client.open(self._session_type, ttl_s=self._environment.session_timeout)
        if self._environment.dialect == "json":
            return leased
        return QueryDialectSession(
            leased.url,
            assign_rows,
            token=self._token,
            headers=leased.headers,
            screen=None,
            release=leased.close,
            delay_s=self._environment.act_delay_s,
            session_id=leased.url.rpartition("/")[2],
        )

    async def close(self) -> None:
        await self._client.close()


class _ServerSessions:
    """Sessions on session servers; the next one is opened on the server that has had the fewest."""

    def __init__(self, address: ServerAddresses) -> None:
        self._token = address.token
        self._opened = dict.fromkeys(address.urls, 0)

    async def open(self) -> Session:
        url = min(self._opened, key=self._opened.__getitem__)
        self._opened[url] += 1
        return await open_session(url, token=self._token)

    async def close(self) -> None:
        """Nothing to do: each session is deleted on its server when it is closed."""


class _QueryServers:
    """Servers of the query-string dialect: each is one screen, used by one episode at a time."""

    def __init__(self, address: ServerAddresses, delay_s: float) -> None:
        self._token, self._delay_s = address.token, delay_s
        self._opened = 0
        self._idle: asyncio.Queue[str] = asyncio.Queue()
        for url in address.urls:
            self._idle.put_nowait(url)

    async def open(self) -> Session:
        url = await self._idle.get()

        async def release() -> None:
            self._idle.put_nowait(url)

        self._opened += 1
        return QueryDialectSession(
            url,
            assign_rows,
            token=self._token,
            screen=None,
            delay_s=self._delay_s,
            release=release,
            session_id=f"{url}#{self._opened}",
        )

    async def close(self) -> None:
        """Nothing to do: the servers keep running, and each session closes its connections."""


@contextlib.contextmanager
def start_gateway(
    *, max_sessions: int, servers: int, session_types: tuple[str, ...] = ("browser",)
) -> Iterator[GatewayAddress]:
    """Run a gateway for the duration of the block."""
    token = secrets.token_urlsafe(24)
    settings = {
        "port": 0,
        "max_sessions": max_sessions,
        "servers": servers,
        "warm": 0,
        "stop_with_stdin": True,
        "session_types": list(session_types),
        "drain_s": 0,
        "max_ttl_s": 3600,
    }
    command = [
        sys.executable,
        "-m",
        "palaestra.gateway",
        *(f"{key}={json.dumps(value)}" for key, value in settings.items()),
    ]
    environment = {**os.environ, TOKEN_VARIABLE: token}
    # In a new process group, so that Ctrl-C reaches only this process, which lets running episodes finish first.
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0)
    # Browsers would starve the training process; their child processes inherit the niceness.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, child.pid, NICENESS)
    try:
        yield GatewayAddress(_read_url(child), token, is_own=True)
    finally:
        _stop(child)


def check_gateway(url: str, token_file: Path | None) -> GatewayAddress:
    """The address of a running gateway; `ConfigError` when it does not answer."""
    token = os.environ.get(TOKEN_VARIABLE) if token_file is None else _read_token(token_file)
    try:
        _ping(f"{url}/sessions", token)
    except urllib.error.HTTPError as error:
        remedy = "Is it a gateway?"
        if error.code == 401:
            remedy = "Give its token: environment.token_file, or PALAESTRA_GATEWAY_TOKEN"
        raise ConfigError("environment.gateway", url, f"responds with status {error.code}", remedy) from None
    except (OSError, ValueError) as error:
        reason = f"cannot be reached ({getattr(error, 'reason', error)})"
        remedy = "Start it with `palaestra gateway`, or omit the key: training then starts one"
        raise ConfigError("environment.gateway", url, reason, remedy) from None
    return GatewayAddress(url, token)


def _check_server(url: str, token: str | None, dialect: str) -> None:
    path = "/health" if dialect == "json" else "/progress"
    place = "environment.session_servers"
    try:
        _ping(url + path, token)
    except urllib.error.HTTPError as error:
        reason = f"responds to GET {path} with status {error.code}"
        other = "query" if dialect == "json" else "json"
        raise ConfigError(place, url, reason, f"Does it need environment.dialect={other}?") from None
    except (OSError, ValueError) as error:
        reason = f"cannot be reached ({getattr(error, 'reason', error)})"
        remedy = "Start it with `python -m palaestra.sessions.server`" if dialect == "json" else "Start it first"
        raise ConfigError(place, url, reason, remedy) from None


def _ping(url: str, token: str | None) -> None:
    request = urllib.request.Request(url)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    urllib.request.urlopen(request, timeout=PING_S).close()


def _read_token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError("environment.token_file", str(path), f"cannot be read ({error.strerror})") from None


def _read_url(child: subprocess.Popen[bytes]) -> str:
    """Wait for the URL that it prints when it is ready."""
    assert child.stdout is not None
    end = time.monotonic() + START_TIMEOUT_S
    while (left := end - time.monotonic()) > 0:
        readable, _, _ = select.select([child.stdout], [], [], left)
        if readable:
            line = child.stdout.readline()
            if not line:
                raise SessionFailed("gateway_failed", f"the gateway ended with status {child.wait()} while starting")
            with contextlib.suppress(ValueError, KeyError):
                return str(json.loads(line)["url"])
    raise SessionFailed("gateway_failed", f"the gateway was not ready within {START_TIMEOUT_S:g} s")


def _stop(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.close()
    try:
        child.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    child.stdout.close()
