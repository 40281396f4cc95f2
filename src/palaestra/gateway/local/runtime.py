"""`LocalRuntime`: sessions on this machine, several in each of a few session servers.

`servers` servers run sessions, and `warm` more are started and ready. When a server dies, its sessions are reported
lost, the first warm server replaces it at once, and a new one is started. A server that does not answer health checks
is killed and replaced in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from palaestra.errors import SessionFailed
from palaestra.gateway.local.orphans import LABEL, register, remove_orphans, unregister
from palaestra.gateway.local.server_process import ServerProcess
from palaestra.gateway.runtime import Address, LostCallback
from palaestra.gateway.server_calls import ServerCalls

_log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Servers that may die while one session is opened before opening fails."""
QUICK_S = 1.0
"""A server that dies sooner counts as a failed start."""


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of a local runtime, in seconds."""

    start_s: float = 60.0
    """From the start of a server until it announces its port."""
    call_s: float = 30.0
    """Opening or closing one session."""
    health_every_s: float = 5.0
    health_s: float = 10.0
    """One health check."""
    health_misses: int = 3
    """Failed health checks in a row after which a server counts as dead."""


def backoff_s(failures: int) -> float:
    """Seconds to wait before another start after this many failures in a row: 0, then 0.2 up to 10."""
    return 0.0 if failures == 0 else min(10.0, 0.1 * 2.0 ** min(failures, 10))


def make_client() -> aiohttp.ClientSession:
    """The HTTP client that opens, closes and checks sessions; proxied requests do not use it."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False)


class LocalRuntime:
    """A `Runtime` of session servers in child processes."""

    def __init__(
        self,
        command: Sequence[str],
        client: aiohttp.ClientSession,
        state_dir: Path,
        name: str,
        *,
        servers: int,
        warm: int,
        session_types: Sequence[str] = ("browser",),
        timeouts: Timeouts | None = None,
    ) -> None:
        self._command, self._client, self._state_dir, self._name = tuple(command), client, state_dir, name
        self._num_servers, self._num_processes = servers, servers + warm
        self._session_types, self._timeouts = tuple(session_types), timeouts or Timeouts()
        self._calls = ServerCalls(client, timeout_s=self._timeouts.call_s)
        self._ready: list[ServerProcess] = []
        """In the order they became ready: the first `servers` run sessions, the others are warm."""
        self._server_of: dict[str, ServerProcess] = {}
        self._server_ready = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._on_lost: LostCallback = lambda session_id, reason: None
        self._directory: Path | None = None
        self._directory_numbers = itertools.count()
        self._last_failure = "none was started"
        self.restarts = 0

    @property
    def session_types(self) -> Sequence[str]:
        """The types of the configuration."""
        return self._session_types

    async def start(self, on_lost: LostCallback) -> None:
        """Remove the orphans of earlier gateways and begin to start servers, without waiting for one to be ready."""
        self._on_lost = on_lost
        self._directory = register(self._state_dir, self._name)
        removed = await asyncio.to_thread(remove_orphans, self._state_dir)
        if removed.gateways:
            _log.warning("an earlier gateway was killed: removed %d of its processes", removed.processes)
        self._tasks = [asyncio.create_task(self._supervise_server()) for _ in range(self._num_processes)]

    async def create(self, session_id: str, session_type: str) -> Address:
        """Open a session on the server with the fewest; when the server dies meanwhile, try another."""
        broken: set[ServerProcess] = set()
        while True:
            server = await self._pick_server(broken)
            self._server_of[session_id] = server
            server.sessions.add(session_id)
            try:
                await self._calls.open_session(self._url(server), session_id)
                return Address("127.0.0.1", server.port, f"/sessions/{session_id}")
            except aiohttp.ClientError as error:
                self._forget(session_id)
                broken.add(server)
                if len(broken) == ATTEMPTS:
                    raise SessionFailed(
                        "session_lost", f"{ATTEMPTS} session servers closed the connection ({error})"
                    ) from None
            except BaseException:
                # It may exist all the same. If it cannot be deleted, `list` still has it and the gateway tries again.
                with contextlib.suppress(SessionFailed):
                    await self.delete(session_id)
                raise

    async def delete(self, session_id: str) -> None:
        """Delete it on its server."""
        server = self._server_of.get(session_id)
        if server is None:
            return
        try:
            await self._calls.delete_session(self._url(server), session_id)
        except aiohttp.ClientError as error:
            if server in self._ready:
                raise SessionFailed("delete_failed", f"session {session_id} could not be closed ({error})") from None
        self._forget(session_id)

    async def list(self) -> Mapping[str, Address]:
        """The sessions of this gateway; those of earlier ones exited with their processes at the start."""
        return {
            session_id: Address("127.0.0.1", server.port, f"/sessions/{session_id}")
            for session_id, server in self._server_of.items()
        }

    def counts(self) -> Mapping[str, int]:
        """The number of servers by state."""
        ready = len(self._ready)
        return {
            "ready": min(ready, self._num_servers),
            "spare": max(0, ready - self._num_servers),
            "starting": self._num_processes - ready,
            "restarted": self.restarts,
        }

    async def stop(self) -> None:
        """Stop every server and unregister."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._directory is not None:
            await asyncio.to_thread(unregister, self._directory)

    async def _supervise_server(self) -> None:
        """Keep one server running, restarting it whenever it dies."""
        failures = 0
        while True:
            await asyncio.sleep(backoff_s(failures))
            try:
                server = await self._start_server()
            except (SessionFailed, OSError) as error:
                failures += 1
                self._last_failure = str(error)
                _log.warning("a session server did not start: %s", error)
                continue
            ready_at = asyncio.get_running_loop().time()
            try:
                reason = await self._wait_for_end(server)
            finally:
                self._ready.remove(server)
                await server.stop()
            failures = failures + 1 if asyncio.get_running_loop().time() - ready_at < QUICK_S else 0
            self.restarts += 1
            for session_id in list(server.sessions):
                self._forget(session_id)
                self._on_lost(session_id, reason)

    async def _start_server(self) -> ServerProcess:
        assert self._directory is not None
        directory = self._directory / str(next(self._directory_numbers))
        label = {LABEL: self._name}
        server = await ServerProcess.start(self._command, directory, label, timeout_s=self._timeouts.start_s)
        self._ready.append(server)
        self._server_ready.set()
        return server

    async def _wait_for_end(self, server: ServerProcess) -> str:
        """Wait until the server exits or fails its health checks; returns the reason."""
        exited = asyncio.create_task(server.wait())
        unhealthy = asyncio.create_task(self._check_health(server))
        try:
            await asyncio.wait((exited, unhealthy), return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                return f"its session server {unhealthy.result()} and was replaced"
            return f"its session server {exited.result()}"
        finally:
            for task in (exited, unhealthy):
                task.cancel()
            await asyncio.gather(exited, unhealthy, return_exceptions=True)

    async def _check_health(self, server: ServerProcess) -> str:
        """Return when the server has failed too many health checks in a row."""
        misses = 0
        while misses < self._timeouts.health_misses:
            await asyncio.sleep(self._timeouts.health_every_s)
            try:
                async with asyncio.timeout(self._timeouts.health_s):
                    async with self._client.get(self._url(server, "/health")) as response:
                        misses = 0 if response.status < 500 else misses + 1
            except (aiohttp.ClientError, TimeoutError):
                misses += 1
        return f"failed {misses} health checks in a row"

    async def _pick_server(self, broken: set[ServerProcess]) -> ServerProcess:
        try:
            async with asyncio.timeout(self._timeouts.start_s):
                while not (running := [server for server in self._ready[: self._num_servers] if server not in broken]):
                    self._server_ready.clear()
                    await self._server_ready.wait()
        except TimeoutError:
            raise SessionFailed("no_server", f"no session server is ready: {self._last_failure}") from None
        return min(running, key=lambda server: len(server.sessions))

    def _forget(self, session_id: str) -> None:
        server = self._server_of.pop(session_id, None)
        if server is not None:
            server.sessions.discard(session_id)

    @staticmethod
    def _url(server: ServerProcess, path: str = "") -> str:
        return f"http://127.0.0.1:{server.port}{path}"
