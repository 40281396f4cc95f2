"""`WarmPool`: pods that are ready for the next session.

A pod that is taken or dies is replaced, with a growing delay if replacements die as well. A pod that has waited for a
lifetime is exchanged for a new one, so that every session has a full lifetime.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from palaestra.errors import SessionFailed
from palaestra.gateway.pods.api import retry_delay_s
from palaestra.gateway.pods.status import Pod

_log = logging.getLogger(__name__)


class _Removal(StrEnum):
    TAKEN = "taken"
    DIED = "died"
    STALE = "stale"


@dataclass
class WarmPod:
    """One pod of the pool."""

    pod: Pod
    session_type: str
    requested_at: float
    """On the event loop's clock, before it was requested: an upper bound of its age."""
    removal: _Removal | None = None
    removed: asyncio.Event = field(default_factory=asyncio.Event)


class WarmPool:
    """Keeps `count` ready pods of every type, as far as the cluster allows."""

    def __init__(
        self,
        session_types: Sequence[str],
        count: int,
        *,
        max_age_s: float,
        create: Callable[[str], Awaitable[Pod]],
        delete: Callable[[str], None],
    ) -> None:
        self._types, self._count, self._max_age_s = tuple(session_types), count, max_age_s
        self._create, self._delete = create, delete
        self._ready: dict[str, WarmPod] = {}
        """By pod name, the oldest first."""
        self._tasks: list[asyncio.Task[None]] = []
        self.replaced = 0

    @property
    def ready(self) -> int:
        """The number of ready pods."""
        return len(self._ready)

    @property
    def starting(self) -> int:
        """The number of pods being created."""
        return len(self._tasks) - len(self._ready)

    def start(self) -> None:
        """Begin to create pods."""
        slots = [name for name in self._types for _ in range(self._count)]
        self._tasks = [asyncio.create_task(self._fill_slot(name)) for name in slots]

    async def stop(self) -> None:
        """Stop creating pods. The controller deletes the ready ones."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._ready.clear()

    def take(self, session_type: str) -> WarmPod | None:
        """Take the pod that has waited longest out of the pool; None when there is none."""
        for pod in self._ready.values():
            if pod.session_type == session_type:
                self._remove(pod, _Removal.TAKEN)
                return pod
        return None

    def discard(self, name: str) -> bool:
        """Remove a pod that died; returns whether it was in the pool."""
        pod = self._ready.get(name)
        if pod is not None:
            self._remove(pod, _Removal.DIED)
        return pod is not None

    def _remove(self, warm: WarmPod, removal: _Removal) -> None:
        del self._ready[warm.pod.name]
        warm.removal = removal
        warm.removed.set()

    async def _fill_slot(self, session_type: str) -> None:
        """Keep one pod ready, replacing it whenever it is taken or dies."""
        clock = asyncio.get_running_loop().time
        failures, last_message = 0, ""
        while True:
            await asyncio.sleep(retry_delay_s(None, failures) if failures else 0.0)
            requested_at = clock()
            try:
                pod = await self._create(session_type)
            except SessionFailed as failure:
                failures += 1
                if str(failure) != last_message:
                    last_message = str(failure)
                    _log.warning("the warm pool has no %s session: %s", session_type, failure)
                continue
            last_message = ""
            warm = WarmPod(pod, session_type, requested_at)
            self._ready[pod.name] = warm
            removal = await self._wait_until_removed(warm)
            failures = failures + 1 if removal is _Removal.DIED else 0
            self.replaced += removal is _Removal.DIED

    async def _wait_until_removed(self, warm: WarmPod) -> _Removal:
        try:
            async with asyncio.timeout(self._max_age_s):
                await warm.removed.wait()
        except TimeoutError:
            if warm.removal is None:
                self._remove(warm, _Removal.STALE)
                self._delete(warm.pod.name)
        assert warm.removal is not None
        return warm.removal
