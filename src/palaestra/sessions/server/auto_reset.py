"""`AutoResetSession`: starts a default task when it is used before a reset, for clients that cannot reset."""

from __future__ import annotations

import asyncio

from palaestra.sessions.action import UiAction
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.session import Session, Step
from palaestra.sessions.task import TaskProgress, TaskRequest, TaskSpec

__all__ = ["AutoResetSession"]


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
