"""The process of a session server: one browser, many sessions, one port.

`python -m palaestra.sessions.server --port 0` prints one line of JSON with its URL when it is ready, and serves until
SIGTERM or, with `--until-eof`, until its standard input ends. It leaves no browser and no directory behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence

from fastapi import FastAPI

from palaestra.errors import ConfigError, SessionFailed, SessionRefused
from palaestra.http.server import build_server, listen, loop_factory
from palaestra.sessions.action import UiAction
from palaestra.sessions.browser.browser import SharedBrowser
from palaestra.sessions.browser.chromium import find_chromium
from palaestra.sessions.browser.session import BrowserSession
from palaestra.sessions.fake import FakeSession
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.server.app import build_app
from palaestra.sessions.session import Session, Step
from palaestra.sessions.task import SCHEMA, TaskProgress, TaskRequest, TaskSpec
from palaestra.strict_json import read_json

GRACE_S = 1
"""Seconds that requests may continue after SIGTERM before the browser is stopped."""

ABORT_S = 1
"""Seconds that the responses to failed requests may take after that."""


class AutoResetSession:
    """Wraps a session and resets it to the task `first` before its first use; other resets work as before."""

    def __init__(self, session: Session, first: TaskRequest) -> None:
        self._session, self._first = session, first
        self._is_reset = False
        self._lock = asyncio.Lock()

    async def reset(self, request: TaskRequest) -> TaskSpec:
        """Begin an episode."""
        async with self._lock:
            spec = await self._session.reset(request)
            self._is_reset = True
            return spec

    async def act(self, action: UiAction, *, step: int) -> Step:
        """Perform an action once."""
        await self._ensure_reset()
        return await self._session.act(action, step=step)

    async def screenshot(self) -> Screenshot:
        """The current screen."""
        await self._ensure_reset()
        return await self._session.screenshot()

    async def progress(self) -> TaskProgress:
        """The verifier's current judgement."""
        await self._ensure_reset()
        return await self._session.progress()

    async def close(self) -> None:
        """Release the screen."""
        self._is_reset = True
        await self._session.close()

    async def _ensure_reset(self) -> None:
        if self._is_reset:
            return
        async with self._lock:
            if not self._is_reset:
                await self._session.reset(self._first)
                self._is_reset = True


async def serve(
    app: FastAPI,
    listening: socket.socket,
    *,
    on_ready: Callable[[int], None],
    until: asyncio.Event,
    abort: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serve `app` on a bound socket until `until` is set; call `on_ready(port)` when it answers.

    Requests that are still in progress after `GRACE_S` are failed by `abort`, so that they get an error response.
    """
    server = build_server(app, lifespan="on", date_header=False, timeout_graceful_shutdown=GRACE_S + ABORT_S)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    stopping = asyncio.create_task(until.wait())
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)  # uvicorn has no event for its start
        if server.started:
            on_ready(listening.getsockname()[1])
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        server.should_exit = True
        await asyncio.wait({serving}, timeout=GRACE_S)
        if not serving.done() and abort is not None:
            await abort()
        await serving


def _build_announcer(descriptor: int, host: str) -> Callable[[int], None]:
    def announce(port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        line = {"schema": SCHEMA, "url": f"http://{shown}:{port}", "port": port, "pid": os.getpid()}
        os.write(descriptor, json.dumps(line).encode() + b"\n")
        if descriptor > 2:
            os.close(descriptor)

    return announce


async def _run(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    listening = listen(options.host, options.port, "server.port")
    stop_browser: Callable[[], Awaitable[None]] | None = None
    try:
        with_task = _read_default_task(options)
        if options.fake:
            app = build_app(with_task(FakeSession))
        else:
            shared = SharedBrowser(find_chromium(options.chromium))
            try:
                # Start the browser now, so that the first session does not wait and a missing browser is reported.
                await shared.get()
            except BaseException:
                await shared.stop()
                raise
            make = with_task(lambda: BrowserSession(shared.get, deadline=options.deadline))
            app = build_app(make, stop=shared.stop)
            stop_browser = shared.stop
        if options.until_eof:
            loop.add_reader(sys.stdin.fileno(), _stop_at_eof, stop)
        announce = _build_announcer(options.announce_fd, options.host)
        await serve(app, listening, on_ready=announce, until=stop, abort=stop_browser)
    finally:
        listening.close()


def _read_default_task(options: argparse.Namespace) -> Callable[[Callable[[], Session]], Callable[[], Session]]:
    """A wrapper that makes sessions start the task of `--task`; without one they wait for a reset."""
    if options.task is None:
        return lambda make: make
    try:
        request = TaskRequest(options.task, options.seed, read_json(options.params))
    except (SessionRefused, ValueError) as error:
        remedy = "Write for example --task data_entry/form --seed 3 --params '{\"rows\": 5}'"
        raise ConfigError("--task", options.task, str(error).rstrip("."), remedy) from None
    return lambda make: lambda: AutoResetSession(make(), request)


def _stop_at_eof(stop: asyncio.Event) -> None:
    try:
        data = os.read(sys.stdin.fileno(), 4096)
    except OSError:
        data = b""
    if not data:
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        stop.set()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a session server; the exit code is 0 after a stop request, 1 after a failure, 2 for invalid options."""
    parser = argparse.ArgumentParser(prog="python -m palaestra.sessions.server", description="Serve UI sessions.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on, without authentication")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 picks a free one")
    parser.add_argument("--announce-fd", type=int, default=1, help="file descriptor for the line with URL and port")
    parser.add_argument("--until-eof", action="store_true", help="stop when standard input ends")
    parser.add_argument("--chromium", default=None, help="path of the browser (default: the best one found)")
    parser.add_argument("--deadline", type=float, default=10.0, help="seconds a page may take to respond")
    parser.add_argument("--task", default=None, help="task (suite/name) of a session that is used without a reset")
    parser.add_argument("--seed", type=int, default=0, help="seed of that task")
    parser.add_argument("--params", default="{}", help="parameters of that task, a JSON object")
    parser.add_argument("--fake", action="store_true", help="serve fake/button without a browser")
    options = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_run(options))
    except ConfigError as refusal:
        sys.stderr.write(f"{refusal}\n")
        return 2
    except SessionFailed as failure:
        sys.stderr.write(f"{failure}\n")
        return 1
    return 0
