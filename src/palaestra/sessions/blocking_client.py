"""Sessions without `await`, for notebooks and scripts: the same session, its loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from palaestra.sessions.action import UiAction
from palaestra.sessions.client import open_session
from palaestra.sessions.gateway_client import GatewayClient
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.session import Session, Step
from palaestra.sessions.task import Progress, TaskRequest, TaskSpec

__all__ = ["BlockingSession"]

T = TypeVar("T")


class BlockingSession:
    """A session to talk to line by line. Counts the steps itself; close it, or use it in a `with`."""

    def __init__(
        self, open_it: Callable[[], Awaitable[Session]], *, afterwards: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """`open_it` is called in the loop of the session's own thread; so is `afterwards`, when all is over."""
        self._afterwards = afterwards
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="palaestra-session", daemon=True)
        self._thread.start()
        self._steps = 0

        async def opened() -> Session:
            return await open_it()

        try:
            self._session = self._done(opened())
        except BaseException:
            self._end()
            raise

    @classmethod
    def on(cls, server: str, *, token: str | None = None) -> BlockingSession:
        """A session on a session server."""
        return cls(lambda: open_session(server, token=token))

    @classmethod
    def through(cls, gateway: str, session_type: str = "browser", *, token: str | None = None) -> BlockingSession:
        """A session from a gateway."""
        client = GatewayClient(gateway, token=token)
        return cls(lambda: client.open(session_type), afterwards=client.close)

    def reset(self, task: str, seed: int = 0, **params: Any) -> TaskSpec:
        """Begin an episode."""
        spec = self._done(self._session.reset(TaskRequest(task, seed, params)))
        self._steps = 0
        return spec

    def act(self, action: UiAction) -> Step:
        """Perform the next action. The same one again after an interruption is not performed twice."""
        step = self._done(self._session.act(action, step=self._steps + 1))
        self._steps = step.number
        return step

    def screenshot(self) -> Screenshot:
        """What is on the screen now."""
        return self._done(self._session.screenshot())

    def progress(self) -> Progress:
        """How far the task has come."""
        return self._done(self._session.progress())

    def close(self) -> None:
        """Give the session up. Harmless when repeated."""
        if self._loop.is_closed():
            return
        try:
            self._done(self._session.close())
        finally:
            self._end()

    def __enter__(self) -> BlockingSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _done(self, doing: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(doing, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interruption leaves nothing running behind one's back
            raise

    def _end(self) -> None:
        async def last() -> None:
            if self._afterwards is not None:
                await self._afterwards()

        try:
            self._done(last())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
