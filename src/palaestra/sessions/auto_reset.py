"""A session that resets itself to a default task when it is used before a reset, for clients that cannot reset."""

from __future__ import annotations

import asyncio

from palaestra.sessions.action import UiAction
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.session import Session, Step
from palaestra.sessions.task import Progress, TaskRequest, TaskSpec

__all__ = ["AutoResetSession"]


class AutoResetSession:
    """Wraps a session and resets it to the task `first` before its first use; other resets work as before."""

    def __init__(self, session: Session, first: TaskRequest) -> None:
        self._session, self._first = session, first
        self._reset = False
        self._turn = asyncio.Lock()

    async def reset(self, request: TaskRequest) -> TaskSpec:
        """Begin an episode."""
        async with self._turn:
            spec = await self._session.reset(request)
            self._reset = True
            return spec

    async def act(self, action: UiAction, *, step: int) -> Step:
        """Perform an action once."""
        await self._begin()
        return await self._session.act(action, step=step)

    async def screenshot(self) -> Screenshot:
        """What is on the screen."""
        await self._begin()
        return await self._session.screenshot()

    async def progress(self) -> Progress:
        """How far the task has come."""
        await self._begin()
        return await self._session.progress()

    async def close(self) -> None:
        """Give the screen up."""
        self._reset = True
        await self._session.close()

    async def _begin(self) -> None:
        if self._reset:
            return
        async with self._turn:
            if not self._reset:
                await self._session.reset(self._first)
                self._reset = True
