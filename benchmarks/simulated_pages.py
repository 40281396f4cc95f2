"""A session server whose pages cost almost nothing: `python -m benchmarks.simulated_pages --latency 0.25`.

It speaks the wire contract with the application of the real session server. A session that is reset to `fake/button` is
drawn in memory and waits as long as a page would take, without using a processor; a session that is reset to any other
task is a page of a real browser, which is started when the first is needed. So a gateway can have hundreds of sessions,
some of them real, on a machine that could not run as many browsers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable

from palaestra.errors import SessionRefused
from palaestra.http.server import listen, loop_factory
from palaestra.sessions.action import UiAction
from palaestra.sessions.browser.browser import SharedBrowser
from palaestra.sessions.browser.chromium import find_chromium
from palaestra.sessions.browser.session import BrowserSession
from palaestra.sessions.fake import FakeSession
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.server.app import build_app
from palaestra.sessions.server.process import serve
from palaestra.sessions.session import Session, Step
from palaestra.sessions.task import TaskProgress, TaskRequest, TaskSpec

__all__ = ["SimulatedPage", "is_hit"]


def is_hit(seed: int, x: int, y: int) -> bool:
    """Whether a click of `fake/button` at this point is rewarded, by an own calculation."""
    left, top = seed * 37 % 120, seed * 53 % 170
    return left <= x < left + 40 and top <= y < top + 40


class SimulatedPage:
    """A session that becomes a drawn page or a browser's page with its reset."""

    def __init__(self, latency_s: float, make_real: Callable[[], Session]) -> None:
        self._latency_s, self._make_real = latency_s, make_real
        self._session: Session | None = None

    async def reset(self, request: TaskRequest) -> TaskSpec:
        """Begin an episode."""
        if self._session is not None:
            await self._session.close()
        is_simulated = request.task.startswith("fake/")
        self._session = FakeSession() if is_simulated else self._make_real()
        if is_simulated:
            await asyncio.sleep(self._latency_s)
        return await self._session.reset(request)

    async def act(self, action: UiAction, *, step: int) -> Step:
        """Perform an action."""
        session = self._require()
        if isinstance(session, FakeSession):
            await asyncio.sleep(self._latency_s)
        return await session.act(action, step=step)

    async def screenshot(self) -> Screenshot:
        """The current screen."""
        return await self._require().screenshot()

    async def progress(self) -> TaskProgress:
        """The verifier's current judgement."""
        return await self._require().progress()

    async def close(self) -> None:
        """Release the screen."""
        if self._session is not None:
            await self._session.close()

    def _require(self) -> Session:
        if self._session is None:
            raise SessionRefused("not_reset", "the session has no task. Reset it first.", status=409)
        return self._session


def announce(port: int) -> None:
    """Say where it listens, as the gateway expects it."""
    os.write(1, json.dumps({"url": f"http://127.0.0.1:{port}", "port": port}).encode() + b"\n")


async def run_server(port: int, latency_s: float) -> None:
    """Serve until SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    shared = SharedBrowser(find_chromium(None))
    app = build_app(
        lambda: SimulatedPage(latency_s, lambda: BrowserSession(shared.get, deadline=30.0)), stop=shared.stop
    )
    stop_browser: Callable[[], Awaitable[None]] = shared.stop
    with listen("127.0.0.1", port, "server.port") as listening:
        await serve(app, listening, on_ready=announce, until=stop, abort=stop_browser)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency", type=float, default=0.25, help="seconds of a reset or an act of a simulated page")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run_server(options.port, options.latency))


if __name__ == "__main__":
    main()
