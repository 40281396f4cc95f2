"""The session server as a process: one browser, many sessions, one port.

`python -m palaestra.sessions.server --port 0` says in one line of JSON where it listens, once it can be talked to, and
serves until SIGTERM (or, with `--until-eof`, until whoever holds its standard input goes). It leaves no browser and no
directory behind.
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

import uvicorn
from fastapi import FastAPI

from palaestra.errors import ConfigError, SessionFailed, SessionRefused
from palaestra.http.server import KEEP_ALIVE_S, SignalFreeServer, listen, loop_factory
from palaestra.sessions.auto_reset import AutoResetSession
from palaestra.sessions.browser_session import BrowserSession
from palaestra.sessions.chromium import find_chromium
from palaestra.sessions.fake import FakeSession
from palaestra.sessions.server_app import build_app
from palaestra.sessions.session import Session
from palaestra.sessions.shared_browser import SharedBrowser
from palaestra.sessions.task import SCHEMA, TaskRequest
from palaestra.strict_json import read_json

__all__ = ["main", "serve"]

GRACE_S = 1
"""How long requests may go on after SIGTERM, before their browser is taken from them."""

CUT_SHORT_S = 1
"""How long their answers may take after that."""


async def serve(
    app: FastAPI, listening: socket.socket, *, ready: Callable[[int], None], until: asyncio.Event,
    cut_short: Callable[[], Awaitable[None]] | None = None,
) -> None:  # fmt: skip
    """Serve `app` on a bound socket until `until` is set; call `ready(port)` when it answers.

    Requests that are still under way a moment later are ended by `cut_short`, so that they are answered with what
    happened to them.
    """
    config = uvicorn.Config(
        app, http="httptools", ws="none", lifespan="on", access_log=False, log_config=None, server_header=False,
        date_header=False, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=GRACE_S + CUT_SHORT_S,
    )  # fmt: skip
    server = SignalFreeServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    stopping = asyncio.create_task(until.wait())
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)  # uvicorn has no event for it
        if server.started:
            ready(listening.getsockname()[1])
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        server.should_exit = True
        await asyncio.wait({serving}, timeout=GRACE_S)
        if not serving.done() and cut_short is not None:
            await cut_short()
        await serving


def _announce(descriptor: int, host: str) -> Callable[[int], None]:
    def ready(port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        line = {"schema": SCHEMA, "url": f"http://{shown}:{port}", "port": port, "pid": os.getpid()}
        os.write(descriptor, json.dumps(line).encode() + b"\n")
        if descriptor > 2:
            os.close(descriptor)

    return ready


async def _run(options: argparse.Namespace) -> None:
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    listening = listen(options.host, options.port, "server.port")
    stop: Callable[[], Awaitable[None]] | None = None
    try:
        begin = _first_task(options)
        if options.fake:
            app = build_app(begin(FakeSession))
        else:
            shared = SharedBrowser(find_chromium(options.chromium))
            try:
                # The first session should not wait for the browser, and a machine without one should say so at once.
                await shared.get()
            except BaseException:
                await shared.stop()
                raise
            make = begin(lambda: BrowserSession(shared.get, deadline=options.deadline))
            app = build_app(make, stop=shared.stop)
            stop = shared.stop
        if options.until_eof:
            loop.add_reader(sys.stdin.fileno(), _end_with_stdin, over)
        ready = _announce(options.announce_fd, options.host)
        await serve(app, listening, ready=ready, until=over, cut_short=stop)
    finally:
        listening.close()


def _first_task(options: argparse.Namespace) -> Callable[[Callable[[], Session]], Callable[[], Session]]:
    """What makes sessions begin the task of `--task`; without one they wait for a reset."""
    if options.task is None:
        return lambda make: make
    try:
        request = TaskRequest(options.task, options.seed, read_json(options.params))
    except (SessionRefused, ValueError) as error:
        remedy = "Write for example --task data_entry/form --seed 3 --params '{\"rows\": 5}'"
        raise ConfigError("--task", options.task, str(error).rstrip("."), remedy) from None
    return lambda make: lambda: AutoResetSession(make(), request)


def _end_with_stdin(over: asyncio.Event) -> None:
    try:
        alive = os.read(sys.stdin.fileno(), 4096)
    except OSError:
        alive = b""
    if not alive:
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        over.set()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a session server; the exit code is 0 when it was asked to stop, 1 when it broke, 2 when it was refused."""
    parser = argparse.ArgumentParser(prog="python -m palaestra.sessions.server", description="Serve UI sessions.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; anybody who reaches it may use it")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    parser.add_argument("--announce-fd", type=int, default=1, help="where to write the line that says the port")
    parser.add_argument("--until-eof", action="store_true", help="stop when standard input ends")
    parser.add_argument("--chromium", default=None, help="the browser; by default the best one found")
    parser.add_argument("--deadline", type=float, default=10.0, help="seconds a page may take to answer")
    parser.add_argument("--task", default=None, help="task that a session begins with if it is not reset; suite/name")
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


if __name__ == "__main__":
    raise SystemExit(main())
