"""Where a run's sessions come from: a gateway (its own or another one), or session servers that run already.

`find_sessions` decides that before a run exists and refuses what does not answer; `open_source` then opens one session
after the other. Sessions speak our own contract or the query-string dialect, as the configuration says.
"""

from __future__ import annotations

import asyncio
import math
import os
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from palaestra.errors import ConfigError
from palaestra.sessions.client import open_session
from palaestra.sessions.gateway_client import GatewayClient
from palaestra.sessions.query_dialect import QueryDialectSession
from palaestra.sessions.query_tasks import assign_rows
from palaestra.sessions.session import Session
from palaestra.train.gateway_child import GatewayAddress, existing_gateway, own_gateway, read_token
from palaestra.train.ui_config import UiRunConfig

__all__ = ["ServerAddresses", "SessionAddress", "SessionSource", "find_sessions", "open_source"]

ACTORS_PER_SERVER = 8
PING_S = 10.0


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


class SessionSource(Protocol):
    """Opens sessions, one per episode."""

    async def open(self) -> Session:
        """A session for one episode, until it is closed."""

    async def close(self) -> None:
        """Close every session that is still open."""


def find_sessions(config: UiRunConfig, stack: ExitStack) -> SessionAddress:
    """The gateway or the session servers a configuration names, or a gateway of our own until the stack is closed."""
    environment = config.environment
    if environment.session_servers:
        # The variable holds a gateway's token, which is not for other servers.
        token = read_token(environment.token_file) if environment.token_file is not None else None
        for url in environment.session_servers:
            _check_server(url, token, environment.dialect)
        return ServerAddresses(environment.session_servers, token)
    if environment.url is not None:
        return existing_gateway(environment.url, environment.token_file)
    actors = config.actor_pool.target_concurrent_actors
    servers = environment.servers or min(os.cpu_count() or 1, math.ceil(actors / ACTORS_PER_SERVER))
    own = own_gateway(max_sessions=actors + 4, servers=servers, session_types=(config.actor.session_type,))
    return stack.enter_context(own)


def open_source(config: UiRunConfig, address: SessionAddress) -> SessionSource:
    """Sessions from that address."""
    environment = config.environment
    if isinstance(address, GatewayAddress):
        return _GatewaySessions(config, address)
    if environment.dialect == "query":
        return _QueryServers(address, environment.act_delay_s)
    return _ServerSessions(address)


class _GatewaySessions:
    """Sessions that a gateway opens and leases."""

    def __init__(self, config: UiRunConfig, address: GatewayAddress) -> None:
        self._client, self._token = GatewayClient(address.url, token=address.token), address.token
        self._session_type, self._environment = config.actor.session_type, config.environment

    async def open(self) -> Session:
        held = await self._client.open(self._session_type, ttl_s=self._environment.session_timeout)
        if self._environment.dialect == "json":
            return held
        return QueryDialectSession(
            held.url, assign_rows, token=self._token, headers=held.headers, screen=None, give_up=held.close,
            delay_s=self._environment.act_delay_s, session_id=held.url.rpartition("/")[2],
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
