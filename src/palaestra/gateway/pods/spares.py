"""Pods that wait, started and ready, for the next session: taken at once, replaced at once.

A spare that dies is replaced, ever more rarely if the next one dies as well; one that has waited for long is exchanged
for a fresh one, so that whoever takes it gets a whole lifetime. Knows no cluster: it is given what makes and removes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from palaestra.errors import SessionFailed
from palaestra.gateway.pods.refusal import retry_in_s
from palaestra.gateway.pods.status import Pod

__all__ = ["Spare", "SparePods"]

_log = logging.getLogger(__name__)


class _End(StrEnum):
    TAKEN = "taken"
    DIED = "died"
    STALE = "stale"


@dataclass
class Spare:
    """One pod that waits."""

    pod: Pod
    session_type: str
    made_at: float
    """On the event loop's clock, before it was asked for: it is no older than that."""
    end: _End | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)


class SparePods:
    """So many ready pods of every type, as far as the cluster allows."""

    def __init__(
        self, session_types: Sequence[str], count: int, *, fresh_s: float,
        make: Callable[[str], Awaitable[Pod]], bury: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._types, self._count, self._fresh_s = tuple(session_types), count, fresh_s
        self._make, self._bury = make, bury
        self._waiting: dict[str, Spare] = {}
        """By name of the pod, the oldest first."""
        self._tasks: list[asyncio.Task[None]] = []
        self.replaced = 0

    @property
    def ready(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def starting(self) -> int:
        """How many are on their way."""
        return len(self._tasks) - len(self._waiting)

    def start(self) -> None:
        """Begin to make them."""
        posts = [name for name in self._types for _ in range(self._count)]
        self._tasks = [asyncio.create_task(self._keep_one(name)) for name in posts]

    async def stop(self) -> None:
        """Make no more; those that wait are left to whoever removes every pod."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._waiting.clear()

    def take(self, session_type: str) -> Spare | None:
        """The spare that has waited longest, taken out of the row; None when there is none."""
        for spare in self._waiting.values():
            if spare.session_type == session_type:
                self._finish(spare, _End.TAKEN)
                return spare
        return None

    def died(self, name: str) -> bool:
        """A pod ended; whether it was one that waited here."""
        spare = self._waiting.get(name)
        if spare is not None:
            self._finish(spare, _End.DIED)
        return spare is not None

    def _finish(self, spare: Spare, end: _End) -> None:
        del self._waiting[spare.pod.name]
        spare.end = end
        spare.news.set()

    async def _keep_one(self, session_type: str) -> None:
        """One post: there is always a spare on it, or one on its way."""
        clock = asyncio.get_running_loop().time
        failures, complaint = 0, ""
        while True:
            await asyncio.sleep(retry_in_s(None, failures) if failures else 0.0)
            made_at = clock()
            try:
                pod = await self._make(session_type)
            except SessionFailed as failure:
                failures += 1
                if str(failure) != complaint:
                    complaint = str(failure)
                    _log.warning("no spare %s session: %s", session_type, failure)
                continue
            complaint = ""
            spare = Spare(pod, session_type, made_at)
            self._waiting[pod.name] = spare
            end = await self._waited(spare)
            failures = failures + 1 if end is _End.DIED else 0
            self.replaced += end is _End.DIED

    async def _waited(self, spare: Spare) -> _End:
        try:
            async with asyncio.timeout(self._fresh_s):
                await spare.news.wait()
        except TimeoutError:
            if spare.end is None:
                self._finish(spare, _End.STALE)
                self._bury(spare.pod.name)
        assert spare.end is not None
        return spare.end
