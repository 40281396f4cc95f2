"""`SessionService` opens, renews, proxies and closes sessions: it applies the lease table to a runtime.

The table decides, the runtime acts. The service also runs the reaper, which removes sessions whose lease expired, and
drains the gateway when it stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from palaestra.config import suggest_name
from palaestra.errors import SessionFailed, SessionRefused
from palaestra.gateway.auth import Caller
from palaestra.gateway.external.lease_journal import LeaseJournal, SavedLease
from palaestra.gateway.leases import LeaseState, LeaseTable, SessionLease
from palaestra.gateway.metrics import Metrics
from palaestra.gateway.runtime import Address, Runtime
from palaestra.sessions.wire import SESSION_TOKEN_HEADER

_log = logging.getLogger(__name__)

RETRY_S = 2.0
"""Seconds until a failed removal is tried again."""
RECONCILE_S = 30.0
"""Seconds between searches for sessions of the runtime that have no lease."""

ALIASES = {"simple_data_entry": "browser"}
"""Aliases of session types, which existing configurations use: a browser runs the data-entry task."""


class SessionService:
    """Opens, leases and closes the sessions of a runtime."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        limit: int,
        new_id: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
        new_token: Callable[[], str] = lambda: secrets.token_urlsafe(32),
        journal: LeaseJournal | None = None,
    ) -> None:
        """`journal`: leases on disk, for a runtime whose sessions outlive the gateway."""
        self.runtime, self.metrics, self.clock = runtime, Metrics(), clock
        self.leases = LeaseTable(limit)
        self.draining = False
        self._new_id, self._new_token, self._journal = new_id, new_token, journal
        self._addresses: dict[str, Address] = {}
        self._pending_deletions: set[str] = set()
        self._leases_changed = asyncio.Event()
        self._reap_at = math.inf
        """When the reaper wakes by itself."""
        self._empty = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.reaper: asyncio.Task[None] | None = None
        """Never ends on its own. If it fails, leases no longer expire and the gateway must stop."""

    async def start(self) -> None:
        """Start the runtime, adopt sessions whose leases are on disk, and remove those that have no lease."""
        await self.runtime.start(self.session_lost)
        if self._journal is not None:
            self._adopt(self._journal, await self.runtime.list())
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
        types = tuple(self.runtime.session_types)
        return (*types, *(alias for alias, name in ALIASES.items() if name in types and alias not in types))

    async def open(self, session_type: str, ttl_s: float) -> SessionLease:
        """Open a session. Refused (422, 429, 503) or `SessionFailed`."""
        if self.draining:
            text = "the gateway is shutting down. Use another one."
            raise SessionRefused("draining", text, status=503, retry_after=1.0)
        known = self.session_types
        if session_type not in known:
            remedy = suggest_name(session_type, known, f"Known: {', '.join(known)}.")
            text = f"session_type = {session_type[:64]!r}: there is no such type. {remedy}"
            raise SessionRefused("unknown_session_type", text, status=422)
        session_id = self._new_id()
        try:
            self.leases.reserve(session_id, session_type, ttl_s, self.clock(), token=self._new_token())
        except SessionRefused:
            self.metrics.totals["refused"] += 1
            raise
        try:
            runtime_type = session_type if session_type in self.runtime.session_types else ALIASES[session_type]
            self._addresses[session_id] = await self.runtime.create(session_id, runtime_type)
            lease = self.leases.mark_opened(session_id, self.clock())
        except BaseException:
            self.metrics.totals["failed"] += 1
            self._addresses.pop(session_id, None)
            self.leases.mark_failed(session_id)
            self._update_empty()
            raise
        if self._journal is not None:
            self._journal.begin(SavedLease(session_id, session_type, ttl_s, lease.token))
        self.metrics.totals["created"] += 1
        self._wake_reaper(lease)
        return lease

    def check_owner(self, session_id: str, caller: Caller) -> None:
        """Refuse (403) a client that asks about another client's session."""
        lease = self.leases.get(session_id)
        # A session that is gone has no owner; the caller gets the error that says how it ended.
        if lease is not None and not caller.may_use(lease.token):
            text = (
                f"session {session_id} belongs to the client that opened it. "
                f"Send the session_token from its opening as {SESSION_TOKEN_HEADER}."
            )
            raise SessionRefused("not_your_session", text, status=403)

    def renew(self, session_id: str, ttl_s: float) -> SessionLease:
        """Start a new term of the lease."""
        lease = self.leases.renew(session_id, ttl_s, self.clock())
        self._wake_reaper(lease)
        return lease

    async def close(self, session_id: str) -> None:
        """Close a session. `SessionRefused` (404, 409) when it cannot be closed."""
        needs_removal = self.leases.close(session_id, self.clock())
        self.metrics.totals["closed"] += 1
        if needs_removal:
            await self._remove(session_id, "it was closed")
        self._update_empty()

    def begin_request(self, session_id: str) -> tuple[SessionLease, Address]:
        """Begin a request: the lease, to be passed to `end_request`, and the address of the session."""
        lease = self.leases.begin_request(session_id, self.clock())
        return lease, self._addresses[session_id]

    def end_request(self, lease: SessionLease) -> None:
        """End a request, which renews the lease."""
        self.leases.end_request(lease, self.clock())
        self._wake_reaper(lease)

    def session_lost(self, session_id: str, reason: str) -> None:
        """Record the death of a session; the runtime calls it."""
        self._addresses.pop(session_id, None)
        self._end_in_journal(session_id)
        if self.leases.mark_lost(session_id, reason, self.clock()):
            self.metrics.totals["lost"] += 1
            _log.warning("session %s is lost: %s", session_id, reason)
        self._update_empty()

    def list_sessions(self) -> list[dict[str, Any]]:
        """Every session, as plain JSON."""
        now = self.clock()
        return [
            {
                "session_id": lease.session_id,
                "session_type": lease.session_type,
                "state": LeaseState.EXPIRED
                if lease.state is LeaseState.LEASED and lease.remaining_s(now) == 0
                else lease.state,
                "age_s": round(now - lease.created_at, 3),
                "ttl_s": lease.ttl_s,
                "lease_left_s": round(lease.remaining_s(now), 3),
                "reason": lease.reason or None,
            }
            for lease in self.leases
        ]

    async def drain(self, grace_s: float) -> None:
        """Refuse new sessions, and wait until the open ones are closed or `grace_s` has passed."""
        self.draining = True
        self._update_empty()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._empty.wait()

    async def remove_expired(self) -> None:
        """Remove sessions whose lease has expired, and retry removals that failed before."""
        expired = self.leases.expire(self.clock())
        self.metrics.totals["reaped"] += len(expired)
        for session_id in (*expired, *self._pending_deletions):
            self._spawn(self._remove(session_id, "its lease expired"))
        self._pending_deletions.clear()

    async def reconcile(self) -> None:
        """Remove sessions of the runtime that have no lease, such as those of a killed gateway."""
        try:
            for session_id in await self.runtime.list():
                if session_id not in self.leases:
                    _log.warning("removing session %s, which has no lease", session_id)
                    await self.runtime.delete(session_id)
        except SessionFailed as error:
            _log.warning("%s; trying again in %g s", error, RECONCILE_S)

    async def _remove(self, session_id: str, reason: str) -> None:
        self._addresses.pop(session_id, None)
        try:
            await self.runtime.delete(session_id)
        except SessionFailed as error:
            # It keeps counting against the limit, because it may still use resources.
            _log.warning("%s; trying again", error)
            self._pending_deletions.add(session_id)
            asyncio.get_running_loop().call_later(RETRY_S, self._leases_changed.set)
            return
        self.leases.mark_removed(session_id, reason)
        self._end_in_journal(session_id)
        self._update_empty()

    def _adopt(self, journal: LeaseJournal, addresses: Mapping[str, Address]) -> None:
        now = self.clock()
        for saved in list(journal.open.values()):
            if saved.session_id not in addresses:
                journal.end(saved.session_id)
                continue
            self._addresses[saved.session_id] = addresses[saved.session_id]
            self.leases.adopt(saved.session_id, saved.session_type, saved.ttl_s, now, token=saved.token)
            self.metrics.totals["adopted"] += 1

    def _end_in_journal(self, session_id: str) -> None:
        if self._journal is not None:
            self._journal.end(session_id)

    async def _reap(self) -> None:
        reconciled_at = self.clock()
        while True:
            wait = min(self.leases.next_expiry() - self.clock(), RETRY_S if self._pending_deletions else RECONCILE_S)
            self._reap_at = self.clock() + wait
            self._leases_changed.clear()
            with contextlib.suppress(TimeoutError):
                # Not wait_for: in Python 3.11 it swallows a cancellation that arrives together with the event.
                async with asyncio.timeout(max(0.0, wait)):
                    await self._leases_changed.wait()
            await self.remove_expired()
            if self.clock() - reconciled_at >= RECONCILE_S:
                reconciled_at = self.clock()
                await self.reconcile()

    def _wake_reaper(self, lease: SessionLease) -> None:
        # Only for a lease that expires before the reaper wakes by itself: it looks at every lease each time.
        if lease.expires_at < self._reap_at:
            self._leases_changed.set()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _update_empty(self) -> None:
        if self.leases.num_active == 0:
            self._empty.set()
        else:
            self._empty.clear()
