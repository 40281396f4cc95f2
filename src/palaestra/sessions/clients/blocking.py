"""`BlockingSession`: a session without `await`, for notebooks and scripts; its event loop runs in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, TypeVar

from palaestra.sessions.action import UiAction
from palaestra.sessions.clients.client import GatewayClient, open_session
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.session import Session, Step
from palaestra.sessions.task import TaskProgress, TaskRequest, TaskSpec

T = TypeVar("T")


class BlockingSession:
    """A session with blocking methods, which counts the steps. Close it, or use it in a `with`."""

    def __init__(
        self, open_new: Callable[[], Awaitable[Session]], *, on_close: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """`open_new` and, after closing, `on_close` are called in the event loop of the session's thread."""
        self._on_close = on_close
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="palaestra-session", daemon=True)
        self._thread.start()
        self._num_steps = 0
        try:
            self._session = self._run(open_new())
        except BaseException:
            self._stop()
            raise

    @classmethod
    def on_server(cls, server: str, *, token: str | None = None) -> BlockingSession:
        """Open a session on a session server."""
        return cls(lambda: open_session(server, token=token))

    @classmethod
    def through_gateway(
        cls, gateway: str, session_type: str = "browser", *, token: str | None = None
    ) -> BlockingSession:
        """Open a session through a gateway."""
        client = GatewayClient(gateway, token=token)
        return cls(lambda: client.open(session_type), on_close=client.close)

    def reset(self, task: str, seed: int = 0, **params: Any) -> TaskSpec:
        """Begin an episode."""
        spec = self._run(self._session.reset(TaskRequest(task, seed, params)))
        self._num_steps = 0
        return spec

    def act(self, action: UiAction) -> Step:
        """Perform the next action. Repeating it after an interruption does not perform it twice."""
        step = self._run(self._session.act(action, step=self._num_steps + 1))
        self._num_steps = step.number
        return step

    def screenshot(self) -> Screenshot:
        """The current screen."""
        return self._run(self._session.screenshot())

    def progress(self) -> TaskProgress:
        """The verifier's current judgement."""
        return self._run(self._session.progress())

    def close(self) -> None:
        """Release the session. Can be called repeatedly."""
        if self._loop.is_closed():
            return
        try:
            self._run(self._session.close())
        finally:
            self._stop()

    def __enter__(self) -> BlockingSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, awaitable: Awaitable[T]) -> T:
        async def wait() -> T:
            return await awaitable

        future = asyncio.run_coroutine_threadsafe(wait(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # after an interruption nothing keeps running
            raise

    def _stop(self) -> None:
        try:
            if self._on_close is not None:
                self._run(self._on_close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
