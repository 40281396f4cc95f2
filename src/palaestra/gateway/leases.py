"""Who may use which session, and until when: the life of a lease as a pure table.

    opening ──opened──▶ leased ──ran out──▶ expired ──close──▶ closing ──closed──▶ (gone)
       │                 │ └────────close─────────────────────▶┘
       └──vanished──▶ lost ◀──vanished──┘        lost ──close, ran out──▶ (gone)

Knows no network, no process and no clock: `now` is seconds of any clock that never goes back. Whoever drives it asks
`due` for what is to be removed and reports back with `closed`. A lost session stays on the table for one more lease, so
that whoever asks for it is told why it is gone instead of that it never was.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from palaestra.errors import SessionFailed, SessionRefused

__all__ = ["Lease", "LeaseTable", "State"]

REMEMBERED = 1000
"""How many sessions that are gone are remembered, to say what became of them."""


class State(StrEnum):
    """Where a session is in its life; one that is in none of these does not exist."""

    OPENING = "opening"
    LEASED = "leased"
    EXPIRED = "expired"
    CLOSING = "closing"
    LOST = "lost"


class Event(StrEnum):
    """What can happen to a session."""

    OPENED = "opened"
    FAILED = "failed to open"
    RAN_OUT = "ran out"
    CLOSE = "close"
    CLOSED = "closed"
    VANISHED = "vanished"


_NEXT: dict[tuple[State, Event], State | None] = {
    (State.OPENING, Event.OPENED): State.LEASED,
    (State.OPENING, Event.FAILED): None,
    (State.OPENING, Event.VANISHED): State.LOST,
    (State.LEASED, Event.RAN_OUT): State.EXPIRED,
    (State.LEASED, Event.CLOSE): State.CLOSING,
    (State.LEASED, Event.VANISHED): State.LOST,
    (State.EXPIRED, Event.CLOSE): State.CLOSING,
    (State.EXPIRED, Event.VANISHED): None,
    (State.CLOSING, Event.CLOSED): None,
    # Removed by its death before our own removal came back: either way it is gone.
    (State.CLOSING, Event.VANISHED): None,
    (State.LOST, Event.CLOSE): None,
    (State.LOST, Event.RAN_OUT): None,
}

AGAIN_S = 5.0
"""The longest that somebody is told to wait before asking for a place again."""

_OCCUPYING = (State.OPENING, State.LEASED, State.EXPIRED, State.CLOSING)


@dataclass(slots=True)
class Lease:
    """One session as the table sees it; only the table changes it."""

    session_id: str
    session_type: str
    ttl_s: float
    admitted_at: float
    expires_at: float
    """Meaningful while leased (then it runs out) and lost (then it is forgotten)."""
    state: State = State.OPENING
    in_use: int = 0
    """Requests under way; a lease does not run out under one."""
    reason: str = ""
    """Why it was lost."""
    token: str = field(default="", repr=False)
    """The token by which its client proves that the session is its own."""

    def left_s(self, now: float) -> float:
        """Seconds until it runs out; the whole term while it is being opened or used."""
        if self.state is State.OPENING or self.in_use:
            return self.ttl_s
        return max(0.0, self.expires_at - now) if self.state in (State.LEASED, State.LOST) else 0.0


class LeaseTable:
    """At most `limit` sessions that occupy something, each in exactly one state."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._leases: dict[str, Lease] = {}
        self._gone: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._leases

    @property
    def occupied(self) -> int:
        """Sessions that count against the limit: all but the lost ones, which hold nothing any more."""
        return sum(lease.state in _OCCUPYING for lease in self._leases.values())

    def counts(self) -> dict[str, int]:
        """Sessions by state, every state named."""
        found = {state.value: 0 for state in State}
        for lease in self._leases.values():
            found[lease.state] += 1
        return found

    def get(self, session_id: str) -> Lease | None:
        """The lease of a session that is on the table."""
        return self._leases.get(session_id)

    def admit(self, session_id: str, session_type: str, ttl_s: float, now: float, *, token: str = "") -> Lease:
        """Take a place for a session that is about to be opened; refused with 429 when there is none."""
        if session_id in self._leases or session_id in self._gone:
            raise ValueError(f"session {session_id!r} is or was on the table; ids are used once")
        if self.occupied >= self.limit:
            text = f"all {self.limit} sessions are taken. Close one, or try again later."
            raise SessionRefused("no_room", text, status=429, retry_after=self._room_in_s(now))
        lease = Lease(session_id, session_type, ttl_s, now, now + ttl_s, token=token)
        self._leases[session_id] = lease
        return lease

    def opened(self, session_id: str, now: float) -> Lease:
        """It is there; its term begins. `SessionFailed` when it was lost before anybody saw it."""
        lease = self._leases[session_id]
        if lease.state is State.LOST:
            self._move(lease, Event.CLOSE)
            raise SessionFailed("session_lost", lease.reason)
        self._move(lease, Event.OPENED)
        lease.expires_at = now + lease.ttl_s
        return lease

    def failed(self, session_id: str) -> None:
        """It could not be opened; its place is free again."""
        lease = self._leases.get(session_id)
        if lease is not None:
            self._move(lease, Event.CLOSE if lease.state is State.LOST else Event.FAILED)

    def begin(self, session_id: str, now: float) -> Lease:
        """A request for it begins. Refused (404, 409) or `SessionFailed` when there is nothing to ask."""
        lease = self._usable(session_id, now)
        if lease.state is State.LOST:
            raise SessionFailed("session_lost", lease.reason)
        lease.in_use += 1
        return lease

    def end(self, lease: Lease, now: float) -> None:
        """The request is over; the lease is renewed by it."""
        lease.in_use -= 1
        if lease.state is State.LEASED:
            lease.expires_at = now + lease.ttl_s

    def renew(self, session_id: str, ttl_s: float, now: float) -> Lease:
        """A new term from now on, shorter or longer than what was left."""
        lease = self._usable(session_id, now)
        if lease.state is State.LOST:
            raise SessionFailed("session_lost", lease.reason)
        lease.ttl_s, lease.expires_at = ttl_s, now + ttl_s
        return lease

    def close(self, session_id: str, now: float) -> bool:
        """Somebody wants it closed. True: remove it and report `closed`; False: there was nothing left to remove."""
        lease = self._usable(session_id, now)
        self._move(lease, Event.CLOSE)
        return lease.state is State.CLOSING

    def closed(self, session_id: str, why: str = "it was closed") -> None:
        """It has been removed. Harmless when it vanished in the meantime."""
        lease = self._leases.get(session_id)
        if lease is not None:
            self._move(lease, Event.CLOSED, why)

    def vanished(self, session_id: str, reason: str, now: float) -> bool:
        """What carried it died; whether that was a loss to somebody."""
        lease = self._leases.get(session_id)
        if lease is None or lease.state is State.LOST:
            return False
        self._move(lease, Event.VANISHED)
        if session_id not in self._leases:
            return False
        lease.reason, lease.expires_at = reason, now + lease.ttl_s
        return True

    def due(self, now: float) -> list[str]:
        """Sessions whose lease has run out by now, all of them closing from here on: remove them."""
        removable = []
        for lease in self:
            self._run_out(lease, now)
            if lease.state is State.EXPIRED:
                self._move(lease, Event.CLOSE)
                removable.append(lease.session_id)
        return removable

    def next_due(self) -> float:
        """When `due` can first have something to say; infinity when nothing is running out."""
        times = (
            lease.expires_at for lease in self._leases.values()
            if lease.state in (State.LEASED, State.EXPIRED, State.LOST) and not lease.in_use
        )  # fmt: skip
        return min(times, default=math.inf)

    def _room_in_s(self, now: float) -> float:
        """When to ask again: at once when something is being removed, else when the first lease may run out.

        Sessions that are used are closed long before their lease ends, so nobody is sent away for longer than a moment.
        """
        if any(lease.state in (State.CLOSING, State.EXPIRED) for lease in self._leases.values()):
            return 1.0
        return float(math.ceil(min(AGAIN_S, max(1.0, self.next_due() - now))))

    def _usable(self, session_id: str, now: float) -> Lease:
        """The lease if it can be spoken about: leased or lost."""
        lease = self._leases.get(session_id)
        if lease is not None:
            self._run_out(lease, now)
            if lease.state is State.OPENING:
                text = f"session {session_id} is still being opened. Wait for the answer to its opening."
                raise SessionRefused("session_opening", text, status=409)
            if session_id in self._leases and lease.state in (State.LEASED, State.LOST):
                return lease
        why = self._gone.get(session_id)
        if lease is not None and why is None:
            why = "its lease ran out" if lease.state is State.EXPIRED else "it is being closed"
        text = f"session {session_id} is gone: {why}." if why else f"there is no session {session_id[:64]!r}."
        raise SessionRefused("no_session", f"{text} Open another one.", status=404)

    def _run_out(self, lease: Lease, now: float) -> None:
        if now >= lease.expires_at and not lease.in_use and lease.state in (State.LEASED, State.LOST):
            self._move(lease, Event.RAN_OUT, "its lease ran out")

    def _move(self, lease: Lease, event: Event, why: str = "it was closed") -> None:
        try:
            target = _NEXT[lease.state, event]
        except KeyError:
            raise ValueError(f"a session that is {lease.state} cannot have {event}") from None
        if target is not None:
            lease.state = target
            return
        if lease.state is State.LOST:
            why = lease.reason
        del self._leases[lease.session_id]
        self._gone[lease.session_id] = why
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
