"""Where sessions are opened, renewed, used and closed: the lease table put to work on a runtime.

The table decides, the runtime acts, and this is the only place that knows both. Drives the reaper and the drain. Time,
ids and the runtime come in through the door.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from palaestra.config import closest_names
from palaestra.errors import SessionFailed, SessionRefused
from palaestra.gateway.auth import Caller
from palaestra.gateway.leases import Lease, LeaseTable, State
from palaestra.gateway.metrics import Metrics
from palaestra.gateway.runtime import Address, Runtime
from palaestra.sessions.wire import SESSION_TOKEN_HEADER

__all__ = ["SessionDesk"]

_log = logging.getLogger(__name__)

RETRY_S = 2.0
"""How soon a removal that failed is tried again."""
RECONCILE_S = 30.0
"""How often the runtime is asked for sessions that nobody leases."""


SAME_AS = {"simple_data_entry": "browser"}
"""Aliases of session types, which existing configurations use: a browser plays the data-entry task."""


class SessionDesk:
    """Opens, hands out and takes back sessions."""

    def __init__(
        self, runtime: Runtime, *, limit: int, new_id: Callable[[], str], clock: Callable[[], float] = time.monotonic,
        new_token: Callable[[], str] = lambda: secrets.token_urlsafe(32),
    ) -> None:  # fmt: skip
        self.runtime, self.metrics, self.clock = runtime, Metrics(), clock
        self.table = LeaseTable(limit)
        self.draining = False
        self._new_id, self._new_token = new_id, new_token
        self._addresses: dict[str, Address] = {}
        self._undeleted: set[str] = set()
        self._news = asyncio.Event()
        self._emptied = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.reaper: asyncio.Task[None] | None = None
        """Never ends by itself: if it does, leases no longer run out, and the gateway must not go on."""

    async def start(self) -> None:
        """Bring up the runtime and remove every session that it knows and we do not."""
        await self.runtime.start(self.lost)
        await self.reconcile()
        self.reaper = self._spawn(self._reap())

    async def stop(self) -> None:
        """Close everything."""
        self.draining = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.runtime.stop()

    @property
    def session_types(self) -> Sequence[str]:
        """Types that clients may ask for: those of the runtime, and their aliases."""
        own = tuple(self.runtime.session_types)
        return (*own, *(name for name, known in SAME_AS.items() if known in own and name not in own))

    async def open(self, session_type: str, ttl_s: float) -> Lease:
        """A session of one's own. Refused (422, 429, 503) or `SessionFailed`."""
        if self.draining:
            raise SessionRefused("draining", "the gateway is stopping. Ask another one.", status=503, retry_after=5.0)
        known = self.session_types
        if session_type not in known:
            close = closest_names(session_type, known, count=1)
            remedy = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
            text = f"session_type = {session_type[:64]!r}: there is no such type. {remedy}"
            raise SessionRefused("unknown_session_type", text, status=422)
        session_id = self._new_id()
        try:
            self.table.admit(session_id, session_type, ttl_s, self.clock(), token=self._new_token())
        except SessionRefused:
            self.metrics.totals["refused"] += 1
            raise
        try:
            carried = session_type if session_type in self.runtime.session_types else SAME_AS[session_type]
            self._addresses[session_id] = await self.runtime.create(session_id, carried)
            lease = self.table.opened(session_id, self.clock())
        except BaseException:
            self.metrics.totals["failed"] += 1
            self._addresses.pop(session_id, None)
            self.table.failed(session_id)
            self._settle()
            raise
        self.metrics.totals["created"] += 1
        self._news.set()
        return lease

    def check_owner(self, session_id: str, caller: Caller) -> None:
        """Refuse (403) a client that asks about another client's session."""
        lease = self.table.get(session_id)
        # A session that is gone has no owner; the caller gets the error that says how it ended.
        if lease is not None and not caller.may_use(lease.token):
            text = (
                f"session {session_id} belongs to the client that opened it. "
                f"Send the session_token from its opening as {SESSION_TOKEN_HEADER}."
            )
            raise SessionRefused("not_your_session", text, status=403)

    def renew(self, session_id: str, ttl_s: float) -> Lease:
        """A new term."""
        lease = self.table.renew(session_id, ttl_s, self.clock())
        self._news.set()
        return lease

    async def close(self, session_id: str) -> None:
        """Give it back. `SessionRefused` (404, 409) when there is nothing to give back."""
        to_remove = self.table.close(session_id, self.clock())
        self.metrics.totals["closed"] += 1
        if to_remove:
            await self._remove(session_id, "it was closed")
        self._settle()

    def begin(self, session_id: str) -> tuple[Lease, Address]:
        """A request for a session begins: its lease, to be given back to `end`, and where the session answers."""
        lease = self.table.begin(session_id, self.clock())
        return lease, self._addresses[session_id]

    def end(self, lease: Lease) -> None:
        """The request is over."""
        self.table.end(lease, self.clock())

    def lost(self, session_id: str, reason: str) -> None:
        """The runtime reports a death."""
        self._addresses.pop(session_id, None)
        if self.table.vanished(session_id, reason, self.clock()):
            self.metrics.totals["lost"] += 1
            _log.warning("session %s is lost: %s", session_id, reason)
        self._settle()

    def listing(self) -> list[dict[str, Any]]:
        """Every session on the table."""
        now = self.clock()
        return [
            {
                "session_id": lease.session_id, "session_type": lease.session_type,
                "state": State.EXPIRED if lease.state is State.LEASED and lease.left_s(now) == 0 else lease.state,
                "age_s": round(now - lease.admitted_at, 3), "ttl_s": lease.ttl_s,
                "lease_left_s": round(lease.left_s(now), 3), "reason": lease.reason or None,
            }
            for lease in self.table
        ]  # fmt: skip

    async def drain(self, grace_s: float) -> None:
        """Open nothing more, and wait until what is open is given back or the grace is over."""
        self.draining = True
        self._settle()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._emptied.wait()

    async def reap_due(self) -> None:
        """Remove what has run out by now; also what could not be removed before."""
        due = self.table.due(self.clock())
        self.metrics.totals["reaped"] += len(due)
        for session_id in (*due, *self._undeleted):
            self._spawn(self._remove(session_id, "its lease ran out"))
        self._undeleted.clear()

    async def reconcile(self) -> None:
        """Remove what the runtime carries and nobody leases, such as what a killed gateway left in a cluster."""
        try:
            for session_id in await self.runtime.list():
                if session_id not in self.table:
                    _log.warning("session %s belongs to nobody and is removed", session_id)
                    await self.runtime.delete(session_id)
        except SessionFailed as error:
            _log.warning("%s; trying again in %g s", error, RECONCILE_S)

    async def _remove(self, session_id: str, why: str) -> None:
        self._addresses.pop(session_id, None)
        try:
            await self.runtime.delete(session_id)
        except SessionFailed as error:
            # It keeps its place: what may still be there must not be given room twice.
            _log.warning("%s; trying again", error)
            self._undeleted.add(session_id)
            return
        self.table.closed(session_id, why)
        self._settle()

    async def _reap(self) -> None:
        reconciled = self.clock()
        while True:
            wait = min(self.table.next_due() - self.clock(), RETRY_S if self._undeleted else RECONCILE_S)
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the news.
                async with asyncio.timeout(max(0.0, wait)):
                    await self._news.wait()
            await self.reap_due()
            if self.clock() - reconciled >= RECONCILE_S:
                reconciled = self.clock()
                await self.reconcile()

    def _spawn(self, doing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _settle(self) -> None:
        if self.table.occupied == 0:
            self._emptied.set()
        else:
            self._emptied.clear()
