"""One session server as a child process, under its keeper.

Started complete or not at all; its end is waited for, not polled for. What may be asked of it over HTTP is the
runtime's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from palaestra.errors import SessionFailed
from palaestra.gateway import keeper

__all__ = ["ServerProcess"]

_log = logging.getLogger(__name__)

STOP_S = 2 * keeper.GRACE_S + 2.0
_LINE_LIMIT = 1 << 16


class ServerProcess:
    """A session server that has said where it listens."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path, port: int) -> None:
        self._process, self.directory, self.port = process, directory, port
        self.sessions: set[str] = set()
        self._output = asyncio.create_task(self._drain())

    @classmethod
    async def start(
        cls, command: Sequence[str], directory: Path, label: Mapping[str, str], *, timeout_s: float
    ) -> ServerProcess:
        """Start one that keeps its files in `directory`; `SessionFailed` when it does not come up in time."""
        directory.mkdir(mode=0o700)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", keeper.__file__, str(directory), *command,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_LINE_LIMIT,
            # A Ctrl-C in the gateway's terminal is the gateway's to answer.
            start_new_session=True, env={**os.environ, **label},
        )  # fmt: skip
        try:
            async with asyncio.timeout(timeout_s):
                port = await _announced_port(process)
        except BaseException as error:
            await _end(process)
            if isinstance(error, TimeoutError):
                text = f"{command[0]} did not say where it listens within {timeout_s:g} s"
                raise SessionFailed("server_not_started", text) from None
            raise
        return cls(process, directory, port)

    @property
    def pid(self) -> int:
        """The keeper's process; the server is its child."""
        return self._process.pid

    async def ended(self) -> str:
        """Wait until it is gone, with everything below it; how it went."""
        return _ending(await self._process.wait())

    async def stop(self) -> None:
        """End it and wait until it is gone. Harmless when repeated."""
        await _end(self._process)
        self._output.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._output

    async def _drain(self) -> None:
        """A pipe that nobody reads fills up and stops the writer."""
        output = self._process.stdout
        assert output is not None
        with contextlib.suppress(ValueError):
            while line := await output.readline():
                _log.debug("session server %s: %s", self.pid, line.decode(errors="replace").rstrip())


async def _announced_port(process: asyncio.subprocess.Process) -> int:
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
    except ValueError:
        line = b"a line without an end"
    if not line:
        raise SessionFailed("server_not_started", f"it {_ending(await process.wait())} before it listened")
    try:
        port = json.loads(line)["port"]
    except (ValueError, TypeError, KeyError):
        port = None
    if not isinstance(port, int) or not 0 < port < 65536:
        raise SessionFailed("server_not_started", f"its first line is {line[:200]!r}, not {{'port': number}}")
    return port


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the server to the end: who is cancelled meanwhile, such as by a second stop, hears of it afterwards."""
    ending = asyncio.create_task(_let_go(process))
    cancelled: asyncio.CancelledError | None = None
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError as error:
            cancelled = error
    ending.result()
    if cancelled is not None:
        raise cancelled


async def _let_go(process: asyncio.subprocess.Process) -> None:
    """Let go of the keeper, which ends the server in order; kill the keeper when it does not come to an end."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _ending(code: int) -> str:
    if code < 0 or code > 128:
        return f"was killed by signal {-code if code < 0 else code - 128}"
    return f"ended with exit code {code}"
