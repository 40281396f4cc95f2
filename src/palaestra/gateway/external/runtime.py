"""`ExternalRuntime`: sessions on session servers that were started elsewhere and outlive the gateway.

Each session type has its servers, on this machine or on others; a session is opened on the one with the fewest. The
gateway's name in the session ids says which sessions are its own, so that several gateways can share servers and the
next gateway of the same name finds what the last one had. Servers are asked for their sessions regularly: a session
that its server no longer has is reported lost, and so are all sessions of a server that does not answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp

from palaestra.errors import SessionFailed
from palaestra.gateway.runtime import Address, LostCallback, owner_name
from palaestra.gateway.server_calls import ServerCalls

_log = logging.getLogger(__name__)

CHECK_EVERY_S, CHECK_S = 2.0, 10.0
"""Seconds between two checks of a server, and seconds that one may take."""
MAX_MISSES = 3
"""Failed checks in a row after which a server counts as gone, with its sessions."""
CALL_S = 30.0
"""Seconds that opening or closing a session may take."""


@dataclass(eq=False)
class _Server:
    url: str
    session_types: set[str] = field(default_factory=set)
    answers: bool = False
    sessions: set[str] = field(default_factory=set)
    """The sessions of this gateway, including those that are being opened."""
    misses: int = 0


class ExternalRuntime:
    """A `Runtime` of session servers that other processes started."""

    def __init__(
        self,
        servers: Mapping[str, Sequence[str]],
        client: aiohttp.ClientSession,
        name: str,
        *,
        keep_sessions: bool = False,
        check_every_s: float = CHECK_EVERY_S,
    ) -> None:
        """`servers`: the URLs for each session type. `keep_sessions`: leave the sessions open when stopped."""
        self._name, self._keep_sessions, self._check_every_s = name, keep_sessions, check_every_s
        self._calls = ServerCalls(client, timeout_s=CALL_S)
        self.session_types: Sequence[str] = tuple(servers)
        self._servers: dict[str, _Server] = {}
        for session_type, urls in servers.items():
            for url in urls:
                self._servers.setdefault(url, _Server(url)).session_types.add(session_type)
        self._server_of: dict[str, _Server] = {}
        self._changing: set[str] = set()
        """Sessions that are being opened or deleted, about which a list says nothing."""
        self._on_lost: LostCallback = lambda session_id, reason: None
        self._checks: list[asyncio.Task[None]] = []

    async def start(self, on_lost: LostCallback) -> None:
        """Ask every server for the sessions of this name, and begin to check the servers."""
        self._on_lost = on_lost
        await asyncio.gather(*map(self._check_until_known, self._servers.values()))
        self._checks = [asyncio.create_task(self._check_regularly(server)) for server in self._servers.values()]

    async def create(self, session_id: str, session_type: str) -> Address:
        """Open a session on the server with the fewest; when that server is gone, try the others."""
        tried: set[_Server] = set()
        while True:
            able = [one for one in self._servers.values() if session_type in one.session_types and one not in tried]
            # A server that did not answer is tried last: it may have come back since.
            server = min(able, key=lambda one: (not one.answers, len(one.sessions)), default=None)
            if server is None:
                urls = ", ".join(one.url for one in tried)
                raise SessionFailed("no_server", f"no session server answers at {urls}")
            tried.add(server)
            self._server_of[session_id] = server
            server.sessions.add(session_id)
            self._changing.add(session_id)
            try:
                await self._calls.open_session(server.url, session_id)
                return _address(server, session_id)
            except aiohttp.ClientError as error:
                self._forget(session_id)
                server.answers = False
                _log.warning("session server %s does not open sessions (%s)", server.url, error)
            except BaseException:
                # It may exist all the same. If it is not deleted here, the next check lists it and it is removed.
                self._forget(session_id)
                raise
            finally:
                self._changing.discard(session_id)

    async def delete(self, session_id: str) -> None:
        """Delete it on its server; a server that is gone has taken it along."""
        server = self._server_of.get(session_id)
        if server is None:
            return
        self._changing.add(session_id)
        try:
            await self._calls.delete_session(server.url, session_id)
            self._forget(session_id)
        except aiohttp.ClientError as error:
            raise SessionFailed("delete_failed", f"session {session_id} could not be closed ({error})") from None
        finally:
            self._changing.discard(session_id)

    async def list(self) -> Mapping[str, Address]:
        """The sessions of this name on all servers that answered, also those that another process opened."""
        return {session_id: _address(server, session_id) for session_id, server in self._server_of.items()}

    def counts(self) -> Mapping[str, int]:
        """The number of servers by state."""
        ready = sum(server.answers for server in self._servers.values())
        return {"ready": ready, "unreachable": len(self._servers) - ready}

    async def stop(self) -> None:
        """Delete every session, unless they are kept for the next gateway."""
        for task in self._checks:
            task.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)
        if self._keep_sessions:
            return
        results = await asyncio.gather(*map(self.delete, list(self._server_of)), return_exceptions=True)
        failures = [result for result in results if isinstance(result, Exception)]
        if failures:
            _log.warning("%d sessions were not closed: %s", len(failures), failures[0])

    async def _check_until_known(self, server: _Server) -> None:
        """Until it answers or counts as gone: the leases of its sessions are given up if it is not asked again."""
        await self._check(server)
        while not server.answers and server.misses < MAX_MISSES:
            await asyncio.sleep(self._check_every_s)
            await self._check(server)

    async def _check_regularly(self, server: _Server) -> None:
        while True:
            await asyncio.sleep(self._check_every_s)
            await self._check(server)

    async def _check(self, server: _Server) -> None:
        """Compare the sessions of a server with those that were opened there."""
        expected = server.sessions - self._changing
        try:
            listed = await self._calls.list_sessions(server.url, timeout_s=CHECK_S)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            server.misses += 1
            if server.misses >= MAX_MISSES:
                server.answers = False
                self._lose(expected, server, f"its session server {server.url} does not answer ({error!r})")
            return
        server.answers, server.misses = True, 0
        self._lose(expected - listed, server, f"its session server {server.url} no longer has it")
        for session_id in listed:
            # Opened by an earlier gateway, or by a request that was given up. Without a lease it will be removed.
            if owner_name(session_id) == self._name and session_id not in self._server_of:
                self._server_of[session_id] = server
                server.sessions.add(session_id)

    def _lose(self, session_ids: set[str], server: _Server, reason: str) -> None:
        for session_id in session_ids:
            if self._server_of.get(session_id) is server and session_id not in self._changing:
                self._forget(session_id)
                self._on_lost(session_id, reason)

    def _forget(self, session_id: str) -> None:
        server = self._server_of.pop(session_id, None)
        if server is not None:
            server.sessions.discard(session_id)


def _address(server: _Server, session_id: str) -> Address:
    parts = urlsplit(server.url)
    return Address(parts.hostname or "", parts.port or 80, f"/sessions/{session_id}")
