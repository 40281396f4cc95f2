"""Writes the state of a run: first the event log, which is authoritative, then the row of the registry.

A full disk stops no run: a write that fails is retried every second until it succeeds. Subscribers of the event bus are
notified after an event is on disk.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TypeVar, Unpack

from palaestra.errors import PalaestraError
from palaestra.files.home import Home
from palaestra.files.run_directory import RunDirectory
from palaestra.runs.phase import Phase, PhaseEvent, advance
from palaestra.runs.record import RunChanges, RunEdit, RunEvent, RunRecord
from palaestra.runs.state.event_log import EDITED, RunEventLog, outcome_before_resume
from palaestra.runs.store.database import RegistryCorrupt
from palaestra.runs.store.rebuild import read_run, rebuild_if_damaged
from palaestra.runs.store.registry import Registry
from palaestra.runs.wire import JsonObject

_log = logging.getLogger(__name__)
_RETRY_S = 1.0
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, None)
_T = TypeVar("_T")


class EventBus:
    """Delivers the events of all runs to subscribers. Use from one event loop."""

    def __init__(self) -> None:
        self._subscribers: dict[object, Callable[[str, RunEvent], None]] = {}

    def subscribe(self, callback: Callable[[str, RunEvent], None]) -> Callable[[], None]:
        """Call `callback` with the run id and the event for every event from now on. Returns `unsubscribe`."""
        key = object()
        self._subscribers[key] = callback

        def unsubscribe() -> None:
            self._subscribers.pop(key, None)

        return unsubscribe

    def publish(self, run_id: str, event: RunEvent) -> None:
        """Deliver an event to all subscribers."""
        for callback in list(self._subscribers.values()):
            callback(run_id, event)

    async def stream(self) -> AsyncIterator[tuple[str, RunEvent]]:
        """Iterate over all events from now on."""
        events: asyncio.Queue[tuple[str, RunEvent]] = asyncio.Queue()
        unsubscribe = self.subscribe(lambda run_id, event: events.put_nowait((run_id, event)))
        try:
            while True:
                yield await events.get()
        finally:
            unsubscribe()


class RunStateWriter:
    """Writes the events and the row of one run, one at a time."""

    def __init__(
        self, home: Home, registry: Registry, record: RunRecord, clock: Callable[[], float], bus: EventBus
    ) -> None:
        self._home, self._registry = home, registry
        self._clock, self._bus = clock, bus
        self._log = RunEventLog(home.run(record.run_id))
        self._lock = asyncio.Lock()
        self.record = record

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self.record.run_id

    @property
    def paths(self) -> RunDirectory:
        """The directory of the run."""
        return self._home.run(self.record.run_id)

    @property
    def phase(self) -> Phase:
        """The current phase."""
        return self.record.phase

    async def read_events(self) -> list[RunEvent]:
        """All events of the run."""
        return await asyncio.to_thread(self._log.read)

    async def advance(
        self,
        event: PhaseEvent,
        *,
        reason: str = "",
        code: str = "",
        facts: JsonObject | None = None,
        at: float | None = None,
        **columns: Unpack[RunChanges],
    ) -> RunRecord:
        """Record an event that changes the phase. `IllegalTransition` if it is impossible in the current phase."""
        async with self._lock:
            phase = advance(self.record.phase, event)
            row = replace(self.record, phase=phase, reason=reason, code=code, **columns)
            await self._write(event, row, reason, code, facts or {}, at)
            return self.record

    async def advance_row(self, event: PhaseEvent, reason: str, code: str, **columns: Unpack[RunChanges]) -> None:
        """`advance` without the event log, for a run whose directory cannot be written."""
        async with self._lock:
            phase = advance(self.record.phase, event)
            self.record = replace(self.record, phase=phase, reason=reason, code=code, **columns)
            await self._retry(self._write_row)

    async def note(self, kind: str, *, reason: str = "", code: str = "", facts: JsonObject | None = None) -> None:
        """Record an event that changes no phase: `alarm`, `alarm_over`, `adopted`, `note`."""
        async with self._lock:
            await self._write(kind, self.record, reason, code, facts or {})

    async def edit(self, changes: RunEdit) -> RunRecord:
        """Change what people wrote about the run. The event log holds it, so that a rebuilt registry has it, too."""
        async with self._lock:
            row = replace(self.record, **changes)
            if row != self.record:
                facts = {**changes, "tags": list(changes["tags"])} if "tags" in changes else dict(changes)
                await self._write(EDITED, row, f"changed {', '.join(changes)}", "", facts)
            return self.record

    async def cancel_resume(self, why: str) -> bool:
        """Return a queued run to its outcome before the resume; False if it was never resumed."""
        async with self._lock:
            before = outcome_before_resume(await self.read_events())
            if self.record.phase is not Phase.QUEUED or before is None:
                return False
            reason = f"{before.reason}; it was not resumed: {why}" if before.reason else f"it was not resumed: {why}"
            facts = {name: value for name, value in before.facts.items() if name != "last_lines"}
            facts.setdefault("ended", before.time)
            kind = str(PhaseEvent.RESUME_CANCELLED)
            event = RunEvent(0, self._clock(), before.attempt, kind, before.phase, reason, before.code, facts)
            written = await self._retry(lambda: self._log.append(event))
            # The directory holds the rest of the row: start, end and progress.
            row = await asyncio.to_thread(read_run, self.paths)
            self.record = row or replace(self.record, phase=before.phase, reason=reason, code=before.code)
            await self._retry(self._write_row)
            self._bus.publish(self.run_id, written)
            return True

    async def update(self, **columns: Unpack[RunChanges]) -> None:
        """Change columns of the row without an event."""
        async with self._lock:
            row = replace(self.record, **columns)
            if row != self.record:
                self.record = row
                await self._retry(self._write_row)

    async def _write(
        self, kind: str, row: RunRecord, reason: str, code: str, facts: JsonObject, at: float | None = None
    ) -> None:
        now = self._clock() if at is None else at
        event = RunEvent(0, now, row.attempt, str(kind), row.phase, reason, code, facts)
        written = await self._retry(lambda: self._log.append(event))
        self.record = row
        await self._retry(self._write_row)
        self._bus.publish(self.run_id, written)

    def _write_row(self) -> None:
        try:
            try:
                self._registry.put(self.record)
            except RegistryCorrupt:
                rebuild_if_damaged(self._home, self._registry)
                self._registry.put(self.record)
        except sqlite3.OperationalError:
            raise
        except (sqlite3.Error, PalaestraError, ValueError, TypeError, OverflowError):
            # The registry is an index: the event log has the state, and the next service reads it from there.
            _log.exception("%s: its row could not be written", self.run_id)

    async def _retry(self, write: Callable[[], _T]) -> _T:
        """Run `write` in a thread, again every second while the disk is full or the registry is locked."""
        warned = False
        while True:
            try:
                return await asyncio.to_thread(write)
            except sqlite3.OperationalError as error:
                problem = f"the registry cannot be written ({error}); retrying every second"
                if "locked" in str(error):
                    problem = "the registry is held by another process; retrying every second"
            except OSError as error:
                if error.errno not in _NO_SPACE:
                    raise
                problem = f"{error}; retrying until there is space"
            if not warned:
                _log.warning("%s: %s", self.run_id, problem)
                warned = True
            await asyncio.sleep(_RETRY_S)
