"""One session server as a child process, under its process guard."""

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
from palaestra.gateway.local import process_guard

_log = logging.getLogger(__name__)

STOP_S = 2 * process_guard.GRACE_S + 2.0
_LINE_LIMIT = 1 << 16


class ServerProcess:
    """A session server that has announced its port."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path, port: int) -> None:
        self._process, self.directory, self.port = process, directory, port
        self.sessions: set[str] = set()
        self._output = asyncio.create_task(self._drain())

    @classmethod
    async def start(
        cls, command: Sequence[str], directory: Path, label: Mapping[str, str], *, timeout_s: float
    ) -> ServerProcess:
        """Start a server with `directory` for its files; `SessionFailed` when it is not ready in time."""
        directory.mkdir(mode=0o700)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            process_guard.__file__,
            str(directory),
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_LIMIT,
            # Ctrl-C in the gateway's terminal must reach the gateway alone.
            start_new_session=True,
            env={**os.environ, **label},
        )
        try:
            async with asyncio.timeout(timeout_s):
                port = await _read_port(process)
        except BaseException as error:
            await _stop(process)
            if isinstance(error, TimeoutError):
                text = f"{command[0]} did not announce its port within {timeout_s:g} s"
                raise SessionFailed("server_not_started", text) from None
            raise
        return cls(process, directory, port)

    @property
    def pid(self) -> int:
        """The process guard, whose child is the server."""
        return self._process.pid

    async def wait(self) -> str:
        """Wait until it and its descendants are gone; returns how it ended."""
        return _describe_exit(await self._process.wait())

    async def stop(self) -> None:
        """Stop it and wait until it is gone. Can be called repeatedly."""
        await _stop(self._process)
        self._output.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._output

    async def _drain(self) -> None:
        """Read the server's output, because a full pipe would block it."""
        output = self._process.stdout
        assert output is not None
        with contextlib.suppress(ValueError):
            while line := await output.readline():
                _log.debug("session server %s: %s", self.pid, line.decode(errors="replace").rstrip())


async def _read_port(process: asyncio.subprocess.Process) -> int:
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
    except ValueError:
        line = b"a line that is too long"
    if not line:
        raise SessionFailed("server_not_started", f"it {_describe_exit(await process.wait())} before it listened")
    try:
        port = json.loads(line)["port"]
    except (ValueError, TypeError, KeyError):
        port = None
    if not isinstance(port, int) or not 0 < port < 65536:
        raise SessionFailed("server_not_started", f"its first line is {line[:200]!r}, not {{'port': number}}")
    return port


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Stop the server completely; a cancellation meanwhile, such as by a second stop, is raised afterwards."""
    stopping = asyncio.create_task(_close_stdin_and_wait(process))
    cancelled: asyncio.CancelledError | None = None
    while not stopping.done():
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError as error:
            cancelled = error
    stopping.result()
    if cancelled is not None:
        raise cancelled


async def _close_stdin_and_wait(process: asyncio.subprocess.Process) -> None:
    """Close the guard's standard input, on which it stops the server; kill the guard if it does not exit."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _describe_exit(code: int) -> str:
    if code < 0 or code > 128:
        return f"was killed by signal {-code if code < 0 else code - 128}"
    return f"ended with exit code {code}"
