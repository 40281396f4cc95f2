"""Leases of sessions: which exist, in which state, and when each expires.

    opening ──opened──▶ leased ──expired──▶ expired ──close──▶ closing ──removed──▶ (gone)
       │                 │ └────────close─────────────────────▶┘
       └──lost──▶ lost ◀──lost──┘        lost ──close, expired──▶ (gone)

`LeaseTable` does no I/O and reads no clock: `now` is seconds of any monotonic clock. `SessionService` drives it: it
removes the sessions that `expire` returns and then calls `mark_removed`. A lost session stays in the table for one more
lease, so that its client gets the reason instead of "no such session".
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from palaestra.errors import SessionFailed, SessionRefused

MAX_REMEMBERED = 1000
"""Removed sessions that are remembered, to tell clients what happened to them."""

MAX_RETRY_AFTER_S = 5.0
"""The longest `Retry-After` of a refusal at the limit."""


class LeaseState(StrEnum):
    """The state of a session that exists."""

    OPENING = "opening"
    LEASED = "leased"
    EXPIRED = "expired"
    CLOSING = "closing"
    LOST = "lost"


class _Event(StrEnum):
    OPENED = "opened"
    OPEN_FAILED = "open failed"
    EXPIRED = "expired"
    CLOSE = "close"
    REMOVED = "removed"
    LOST = "lost"


_NEXT: dict[tuple[LeaseState, _Event], LeaseState | None] = {
    (LeaseState.OPENING, _Event.OPENED): LeaseState.LEASED,
    (LeaseState.OPENING, _Event.OPEN_FAILED): None,
    (LeaseState.OPENING, _Event.LOST): LeaseState.LOST,
    (LeaseState.LEASED, _Event.EXPIRED): LeaseState.EXPIRED,
    (LeaseState.LEASED, _Event.CLOSE): LeaseState.CLOSING,
    (LeaseState.LEASED, _Event.LOST): LeaseState.LOST,
    (LeaseState.EXPIRED, _Event.CLOSE): LeaseState.CLOSING,
    (LeaseState.EXPIRED, _Event.LOST): None,
    (LeaseState.CLOSING, _Event.REMOVED): None,
    # It died before our own removal completed: either way it is gone.
    (LeaseState.CLOSING, _Event.LOST): None,
    (LeaseState.LOST, _Event.CLOSE): None,
    (LeaseState.LOST, _Event.EXPIRED): None,
}


@dataclass(slots=True)
class SessionLease:
    """The lease of one session; only the table changes it."""

    session_id: str
    session_type: str
    ttl_s: float
    created_at: float
    expires_at: float
    """While leased, when it expires; while lost, when it is forgotten."""
    state: LeaseState = LeaseState.OPENING
    in_flight: int = 0
    """Requests in flight; a lease does not expire during one."""
    reason: str = ""
    """Why the session was lost."""
    token: str = field(default="", repr=False)
    """The token by which its client proves that it opened the session."""

    def remaining_s(self, now: float) -> float:
        """Seconds until it expires; the whole term while the session is being opened or used."""
        if self.state is LeaseState.OPENING or self.in_flight:
            return self.ttl_s
        return max(0.0, self.expires_at - now) if self.state in (LeaseState.LEASED, LeaseState.LOST) else 0.0


class LeaseTable:
    """At most `limit` sessions that use resources, each in exactly one state."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._leases: dict[str, SessionLease] = {}
        self.num_active = 0
        """Sessions that count against the limit: all but the lost ones, which no longer use resources."""
        self._removed: OrderedDict[str, str] = OrderedDict()
        """Why each of the last removed sessions is gone."""

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[SessionLease]:
        return iter(list(self._leases.values()))

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._leases

    def count_by_state(self) -> dict[str, int]:
        """The number of sessions in every state."""
        counts = {state.value: 0 for state in LeaseState}
        for lease in self._leases.values():
            counts[lease.state] += 1
        return counts

    def get(self, session_id: str) -> SessionLease | None:
        """The lease of a session, if it exists."""
        return self._leases.get(session_id)

    def reserve(self, session_id: str, session_type: str, ttl_s: float, now: float, *, token: str = "") -> SessionLease:
        """Count a session that is about to be opened; refused with 429 when the limit is reached."""
        if session_id in self._leases or session_id in self._removed:
            raise ValueError(f"session {session_id!r} exists or existed; ids are used once")
        if self.num_active >= self.limit:
            text = f"all {self.limit} sessions are taken. Close one, or try again later."
            raise SessionRefused("no_room", text, status=429, retry_after=self._retry_after_s(now))
        return self._add(SessionLease(session_id, session_type, ttl_s, now, now + ttl_s, token=token))

    def adopt(self, session_id: str, session_type: str, ttl_s: float, now: float, *, token: str) -> None:
        """Lease a session that an earlier gateway opened, for a whole term from now."""
        lease = self._add(SessionLease(session_id, session_type, ttl_s, now, now + ttl_s, token=token))
        self._apply(lease, _Event.OPENED)

    def mark_opened(self, session_id: str, now: float) -> SessionLease:
        """Start the term of a session that was opened; `SessionFailed` when it was lost meanwhile."""
        lease = self._leases[session_id]
        if lease.state is LeaseState.LOST:
            self._apply(lease, _Event.CLOSE)
            raise SessionFailed("session_lost", lease.reason)
        self._apply(lease, _Event.OPENED)
        lease.expires_at = now + lease.ttl_s
        return lease

    def mark_failed(self, session_id: str) -> None:
        """Stop counting a session that could not be opened."""
        lease = self._leases.get(session_id)
        if lease is not None:
            self._apply(lease, _Event.CLOSE if lease.state is LeaseState.LOST else _Event.OPEN_FAILED)

    def begin_request(self, session_id: str, now: float) -> SessionLease:
        """Count a request to the session. Refused (404, 409) or `SessionFailed` when it cannot be used."""
        lease = self._get_usable(session_id, now)
        lease.in_flight += 1
        return lease

    def end_request(self, lease: SessionLease, now: float) -> None:
        """Count the end of a request, which renews the lease."""
        lease.in_flight -= 1
        if lease.state is LeaseState.LEASED:
            lease.expires_at = now + lease.ttl_s

    def renew(self, session_id: str, ttl_s: float, now: float) -> SessionLease:
        """Start a new term now, shorter or longer than the rest of the old one."""
        lease = self._get_usable(session_id, now)
        lease.ttl_s, lease.expires_at = ttl_s, now + ttl_s
        return lease

    def close(self, session_id: str, now: float) -> bool:
        """Close a session. True: the caller removes it, then calls `mark_removed`; False: nothing is left to do."""
        lease = self._get(session_id, now)
        self._apply(lease, _Event.CLOSE)
        return lease.state is LeaseState.CLOSING

    def mark_removed(self, session_id: str, reason: str = "it was closed") -> None:
        """Forget a session that was removed. Does nothing when it was lost meanwhile."""
        lease = self._leases.get(session_id)
        if lease is not None:
            self._apply(lease, _Event.REMOVED, reason)

    def mark_lost(self, session_id: str, reason: str, now: float) -> bool:
        """Record that the session died, and return whether a client still held it."""
        lease = self._leases.get(session_id)
        if lease is None or lease.state is LeaseState.LOST:
            return False
        self._apply(lease, _Event.LOST)
        if session_id not in self._leases:
            return False
        lease.reason, lease.expires_at = reason, now + lease.ttl_s
        return True

    def expire(self, now: float) -> list[str]:
        """Move sessions whose lease has expired to `closing` and return their ids, for the caller to remove."""
        expired = []
        for lease in self:
            self._expire(lease, now)
            if lease.state is LeaseState.EXPIRED:
                self._apply(lease, _Event.CLOSE)
                expired.append(lease.session_id)
        return expired

    def next_expiry(self) -> float:
        """The earliest time at which `expire` can have work; infinity when nothing can expire."""
        states = (LeaseState.LEASED, LeaseState.EXPIRED, LeaseState.LOST)
        times = (lease.expires_at for lease in self._leases.values() if lease.state in states and not lease.in_flight)
        return min(times, default=math.inf)

    def _retry_after_s(self, now: float) -> float:
        """One second when a session is being removed, else until the first lease may expire, within bounds.

        Most sessions are closed long before their lease expires, so a long wait would be wrong.
        """
        if any(lease.state in (LeaseState.CLOSING, LeaseState.EXPIRED) for lease in self._leases.values()):
            return 1.0
        return float(math.ceil(min(MAX_RETRY_AFTER_S, max(1.0, self.next_expiry() - now))))

    def _get_usable(self, session_id: str, now: float) -> SessionLease:
        lease = self._get(session_id, now)
        if lease.state is LeaseState.LOST:
            raise SessionFailed("session_lost", lease.reason)
        return lease

    def _get(self, session_id: str, now: float) -> SessionLease:
        """The lease of a session that is leased or lost; refused (404, 409) otherwise."""
        lease = self._leases.get(session_id)
        if lease is not None:
            self._expire(lease, now)
            if lease.state is LeaseState.OPENING:
                text = f"session {session_id} is still being opened. Wait for the response to POST /sessions."
                raise SessionRefused("session_opening", text, status=409)
            if session_id in self._leases and lease.state in (LeaseState.LEASED, LeaseState.LOST):
                return lease
        reason = self._removed.get(session_id)
        if lease is not None and reason is None:
            reason = "its lease expired" if lease.state is LeaseState.EXPIRED else "it is being closed"
        text = f"session {session_id} is gone: {reason}." if reason else f"there is no session {session_id[:64]!r}."
        raise SessionRefused("no_session", f"{text} Open another one.", status=404)

    def _expire(self, lease: SessionLease, now: float) -> None:
        if now >= lease.expires_at and not lease.in_flight and lease.state in (LeaseState.LEASED, LeaseState.LOST):
            self._apply(lease, _Event.EXPIRED, "its lease expired")

    def _add(self, lease: SessionLease) -> SessionLease:
        self._leases[lease.session_id] = lease
        self.num_active += 1
        return lease

    def _apply(self, lease: SessionLease, event: _Event, reason: str = "it was closed") -> None:
        try:
            state = _NEXT[lease.state, event]
        except KeyError:
            raise ValueError(f"the event {event.value!r} cannot happen to a session that is {lease.state}") from None
        if lease.state is not LeaseState.LOST and state in (LeaseState.LOST, None):
            self.num_active -= 1
        if state is not None:
            lease.state = state
            return
        del self._leases[lease.session_id]
        self._removed[lease.session_id] = lease.reason if lease.state is LeaseState.LOST else reason
        while len(self._removed) > MAX_REMEMBERED:
            self._removed.popitem(last=False)
