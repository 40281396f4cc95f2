"""Sessions on this machine: a handful of session servers, each carrying several sessions.

As many servers as asked for carry sessions, and a few more wait in reserve, started and ready. When one dies, its
sessions are reported lost, the first in reserve takes its place at once, and a new one is started to wait. A server
that is alive and does not answer is killed, which makes it an ordinary death.
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

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.gateway.orphans import LABEL, register, sweep, unregister
from palaestra.gateway.runtime import Address, LostCallback
from palaestra.gateway.server_process import ServerProcess

__all__ = ["LocalRuntime", "Patience", "backoff_s", "least_loaded", "make_client"]

_log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Servers that may die under one opening before it is given up."""
QUICK_S = 1.0
"""A server that dies sooner died of its own start, and so would the next."""


@dataclass(frozen=True)
class Patience:
    """How long what may take."""

    start_s: float = 60.0
    """From the start of a server to its word where it listens; a browser on a loaded machine takes its time."""
    call_s: float = 30.0
    """Opening or closing one session."""
    health_every_s: float = 5.0
    health_s: float = 10.0
    """One answer to the question after its health."""
    health_misses: int = 3
    """Misses in a row after which a server counts as dead."""


def least_loaded(loads: Sequence[int]) -> int:
    """Which server gets the next session: the one with the fewest, the first of them."""
    return min(range(len(loads)), key=loads.__getitem__)


def backoff_s(failures: int) -> float:
    """How long to wait before another start after so many failures in a row: at once, then 0.2 s up to 10 s."""
    return 0.0 if failures == 0 else min(10.0, 0.1 * 2.0 ** min(failures, 10))


def make_client() -> aiohttp.ClientSession:
    """The client that opens, closes and watches; what agents ask of their sessions does not pass through it."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False)


class LocalRuntime:
    """A `Runtime` of session-server processes."""

    def __init__(
        self, command: Sequence[str], client: aiohttp.ClientSession, state_dir: Path, name: str, *,
        servers: int, warm: int, session_types: Sequence[str] = ("browser",), patience: Patience | None = None,
    ) -> None:  # fmt: skip
        self._command, self._client, self._state_dir, self._name = tuple(command), client, state_dir, name
        self._servers, self._posts = servers, servers + warm
        self._session_types, self._patience = tuple(session_types), patience or Patience()
        self._ready: list[ServerProcess] = []
        """In the order they became ready: the first `servers` carry sessions, the others wait."""
        self._carrier: dict[str, ServerProcess] = {}
        self._news = asyncio.Event()
        """Set when a server has become ready."""
        self._tasks: list[asyncio.Task[None]] = []
        self._lost: LostCallback = lambda session_id, reason: None
        self._directory: Path | None = None
        self._numbers = itertools.count()
        self._last_failure = "none was started yet"
        self.restarts = 0

    @property
    def session_types(self) -> Sequence[str]:
        """What the configuration says the servers understand."""
        return self._session_types

    async def start(self, lost: LostCallback) -> None:
        """Remove what an earlier gateway left and begin to start servers; the first session waits for the first."""
        self._lost = lost
        self._directory = register(self._state_dir, self._name)
        swept = await asyncio.to_thread(sweep, self._state_dir)
        if swept.gateways:
            _log.warning("an earlier gateway was killed: removed %d of its processes", swept.processes)
        self._tasks = [asyncio.create_task(self._keep_one()) for _ in range(self._posts)]

    async def create(self, session_id: str, session_type: str) -> Address:
        """A session on the server with the fewest; a server that dies meanwhile is given up for another."""
        broken: set[ServerProcess] = set()
        while True:
            server = await self._chosen(broken)
            self._carrier[session_id] = server
            server.sessions.add(session_id)
            try:
                await self._open_on(server, session_id)
                return Address("127.0.0.1", server.port, f"/sessions/{session_id}")
            except aiohttp.ClientError as error:
                self._forget(session_id)
                broken.add(server)
                if len(broken) == ATTEMPTS:
                    raise SessionFailed("session_lost", f"{ATTEMPTS} session servers broke off ({error})") from None
            except BaseException:
                await self._undo(session_id)
                raise

    async def delete(self, session_id: str) -> None:
        """Remove it from its server."""
        server = self._carrier.get(session_id)
        if server is None:
            return
        try:
            async with asyncio.timeout(self._patience.call_s):
                async with self._client.delete(self._url(server, f"/sessions/{session_id}")) as response:
                    await response.read()
        except TimeoutError:
            raise SessionFailed("delete_timeout", f"session {session_id} could not be closed in time") from None
        except aiohttp.ClientError as error:
            if server in self._ready:
                raise SessionFailed("delete_failed", f"session {session_id} could not be closed ({error})") from None
        else:
            if response.status >= 500:
                text = f"session {session_id} could not be closed (status {response.status})"
                raise SessionFailed("delete_failed", text)
        self._forget(session_id)

    async def list(self) -> Mapping[str, Address]:
        """What this gateway made; what others made went with their processes at the start."""
        return {
            session_id: Address("127.0.0.1", server.port, f"/sessions/{session_id}")
            for session_id, server in self._carrier.items()
        }

    def facts(self) -> Mapping[str, int]:
        """Servers by what they are doing."""
        ready = len(self._ready)
        return {
            "ready": min(ready, self._servers), "spare": max(0, ready - self._servers),
            "starting": self._posts - ready, "restarted": self.restarts,
        }  # fmt: skip

    async def stop(self) -> None:
        """End every server, and leave no trace in the state directory."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._directory is not None:
            await asyncio.to_thread(unregister, self._directory)

    async def _keep_one(self) -> None:
        """One post: there is always a server on it, or one on its way."""
        failures = 0
        while True:
            await asyncio.sleep(backoff_s(failures))
            try:
                server = await self._started()
            except (SessionFailed, OSError) as error:
                failures += 1
                self._last_failure = str(error)
                _log.warning("a session server did not start: %s", error)
                continue
            ready_at = asyncio.get_running_loop().time()
            try:
                reason = await self._watched(server)
            finally:
                self._ready.remove(server)
                await server.stop()
            failures = failures + 1 if asyncio.get_running_loop().time() - ready_at < QUICK_S else 0
            self.restarts += 1
            self._bury(server, reason)

    async def _started(self) -> ServerProcess:
        assert self._directory is not None
        directory = self._directory / str(next(self._numbers))
        label = {LABEL: self._name}
        server = await ServerProcess.start(self._command, directory, label, timeout_s=self._patience.start_s)
        self._ready.append(server)
        self._news.set()
        return server

    async def _watched(self, server: ServerProcess) -> str:
        """Wait for the process, and ask after its health meanwhile; why it is over."""
        ended = asyncio.create_task(server.ended())
        unwell = asyncio.create_task(self._unwell(server))
        try:
            await asyncio.wait((ended, unwell), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                return f"its session server {unwell.result()} and was replaced"
            return f"its session server {ended.result()}"
        finally:
            for task in (ended, unwell):
                task.cancel()
            await asyncio.gather(ended, unwell, return_exceptions=True)

    async def _unwell(self, server: ServerProcess) -> str:
        """Returns when it has missed the question after its health too often."""
        misses = 0
        while misses < self._patience.health_misses:
            await asyncio.sleep(self._patience.health_every_s)
            try:
                async with asyncio.timeout(self._patience.health_s):
                    async with self._client.get(self._url(server, "/health")) as response:
                        misses = 0 if response.status < 500 else misses + 1
            except (aiohttp.ClientError, TimeoutError):
                misses += 1
        return f"did not answer {misses} times in a row"

    async def _chosen(self, broken: set[ServerProcess]) -> ServerProcess:
        try:
            async with asyncio.timeout(self._patience.start_s):
                while not (carrying := [server for server in self._ready[: self._servers] if server not in broken]):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise SessionFailed("no_server", f"no session server is ready: {self._last_failure}") from None
        return carrying[least_loaded([len(server.sessions) for server in carrying])]

    async def _open_on(self, server: ServerProcess, session_id: str) -> None:
        try:
            async with asyncio.timeout(self._patience.call_s):
                asked = self._client.post(self._url(server, "/sessions"), json={"session_id": session_id})
                async with asked as response:
                    body = await response.json(content_type=None) if response.status != 201 else {}
        except TimeoutError:
            text = f"the session server did not open a session within {self._patience.call_s:g} s"
            raise SessionFailed("open_timeout", text) from None
        except ValueError:
            raise SessionFailed("open_failed", "the session server's answer is not JSON") from None
        if response.status != 201:
            raise _failure(response.status, body)

    async def _undo(self, session_id: str) -> None:
        """It may exist all the same; if it cannot be removed, `list` goes on naming it, and the gateway tries again."""
        with contextlib.suppress(SessionFailed):
            await self.delete(session_id)

    def _forget(self, session_id: str) -> None:
        server = self._carrier.pop(session_id, None)
        if server is not None:
            server.sessions.discard(session_id)

    def _bury(self, server: ServerProcess, reason: str) -> None:
        for session_id in list(server.sessions):
            self._forget(session_id)
            self._lost(session_id, reason)

    @staticmethod
    def _url(server: ServerProcess, path: str) -> str:
        return f"http://127.0.0.1:{server.port}{path}"


def _failure(status: int, body: object) -> SessionFailed | SessionRefused:
    """What a session server's refusal to open a session means to our client."""
    error = body.get("error") if isinstance(body, dict) else None
    error = error if isinstance(error, dict) else {}
    message = str(error.get("message", f"the session server answered with status {status}"))
    if 400 <= status < 500:
        return SessionRefused(str(error.get("code", "refused")), message, status=status)
    return SessionFailed(str(error.get("reason", "open_failed")), message)
