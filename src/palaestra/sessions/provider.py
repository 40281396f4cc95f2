"""`SessionProvider`: opens a run's sessions, from a gateway (started here or running already) or from session servers.

`find_sessions` decides where sessions come from before a run exists and refuses what does not answer, `load_tasks`
tries every task once, and `open_provider` opens one session per episode. Sessions speak our own contract or the
query-string dialect, as the configuration says.
"""

from __future__ import annotations

import asyncio
import math
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from palaestra.errors import ConfigError, SessionFailed, SessionRefused
from palaestra.sessions.client import open_session
from palaestra.sessions.environment_config import EnvironmentConfig
from palaestra.sessions.gateway_client import GatewayClient
from palaestra.sessions.gateway_process import GatewayAddress, check_gateway, read_token, start_gateway
from palaestra.sessions.query_dialect import QueryDialectSession
from palaestra.sessions.query_tasks import assign_rows
from palaestra.sessions.session import Session
from palaestra.sessions.task import TaskRequest, TaskSpec

__all__ = ["ServerAddresses", "SessionAddress", "SessionProvider", "find_sessions", "load_tasks", "open_provider"]

ACTORS_PER_SERVER = 8
PING_S = 10.0
CONCURRENT_LOADS = 4
TEMPORARY_REFUSALS = ("no_session", "no_room", "draining")
"""Refusals that depend on the moment and say nothing about the task."""


@dataclass(frozen=True)
class ServerAddresses:
    """Session servers that run already, without a gateway in front of them."""

    urls: tuple[str, ...]
    token: str | None

    @property
    def description(self) -> str:
        """The start of a sentence about them."""
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
        # The variable holds a gateway's token, which is not for other servers.
        token = read_token(environment.token_file) if environment.token_file is not None else None
        for url in environment.session_servers:
            _check_server(url, token, environment.dialect)
        return ServerAddresses(environment.session_servers, token)
    if environment.url is not None:
        return check_gateway(environment.url, environment.token_file)
    servers = environment.servers or min(os.cpu_count() or 1, math.ceil(actors / ACTORS_PER_SERVER))
    gateway = start_gateway(max_sessions=actors + 4, servers=servers, session_types=(session_type,))
    return stack.enter_context(gateway)


def open_provider(environment: EnvironmentConfig, address: SessionAddress, *, session_type: str) -> SessionProvider:
    """Sessions from that address."""
    if isinstance(address, GatewayAddress):
        return _GatewaySessions(environment, address, session_type)
    if environment.dialect == "query":
        return _QueryServers(address, environment.act_delay_s)
    return _ServerSessions(address)


def load_tasks(
    requests: Sequence[TaskRequest], environment: EnvironmentConfig, address: SessionAddress, *, session_type: str,
    actors: int,
) -> list[TaskSpec]:  # fmt: skip
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
    """Sessions that a gateway opens and leases."""

    def __init__(self, environment: EnvironmentConfig, address: GatewayAddress, session_type: str) -> None:
        self._client, self._token = GatewayClient(address.url, token=address.token), address.token
        self._session_type, self._environment = session_type, environment

    async def open(self) -> Session:
        leased = await self._client.open(self._session_type, ttl_s=self._environment.session_timeout)
        if self._environment.dialect == "json":
            return leased
        return QueryDialectSession(
            leased.url, assign_rows, token=self._token, headers=leased.headers, screen=None, give_up=leased.close,
            delay_s=self._environment.act_delay_s, session_id=leased.url.rpartition("/")[2],
        )  # fmt: skip

    async def close(self) -> None:
        await self._client.close()


class _ServerSessions:
    """Sessions of session servers, the next one on the server that has had the fewest."""

    def __init__(self, address: ServerAddresses) -> None:
        self._token = address.token
        self._opened = dict.fromkeys(address.urls, 0)

    async def open(self) -> Session:
        url = min(self._opened, key=self._opened.__getitem__)
        self._opened[url] += 1
        return await open_session(url, token=self._token)

    async def close(self) -> None:
        """Nothing is shared between sessions; each is deleted on its server when it is closed."""


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
            url, assign_rows, token=self._token, screen=None, delay_s=self._delay_s, give_up=release,
            session_id=f"{url}#{self._opened}",
        )  # fmt: skip

    async def close(self) -> None:
        """The servers stay; each session lets go of its connections when it is closed."""


def _check_server(url: str, token: str | None, dialect: str) -> None:
    path = "/health" if dialect == "json" else "/progress"
    request = urllib.request.Request(url + path)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    place = "environment.session_servers"
    try:
        with urllib.request.urlopen(request, timeout=PING_S):
            return
    except urllib.error.HTTPError as error:
        reason = f"answers GET {path} with status {error.code}"
        other = "query" if dialect == "json" else "json"
        raise ConfigError(place, url, reason, f"Does it speak environment.dialect={other}?") from None
    except (OSError, ValueError) as error:
        reason = f"cannot be reached ({getattr(error, 'reason', error)})"
        remedy = "Start it with `python -m palaestra.sessions.server`" if dialect == "json" else "Start it first"
        raise ConfigError(place, url, reason, remedy) from None
