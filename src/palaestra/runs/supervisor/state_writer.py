"""One run's life and its row, kept in step: the log first, because it is the truth, then the index.

A disk that is full stops no run: what must be written is tried again every second until it fits.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from palaestra.errors import PalaestraError
from palaestra.files.home import Home
from palaestra.files.run_directory import RunDirectory
from palaestra.runs.phase import Phase, PhaseEvent, advance
from palaestra.runs.record import RunEvent, RunRecord
from palaestra.runs.state.event_log import RunEventLog
from palaestra.runs.store.database import RegistryCorrupt
from palaestra.runs.store.rebuild import read_run, rebuild_if_damaged
from palaestra.runs.store.registry import Registry
from palaestra.runs.supervisor.resume import outcome_before

__all__ = ["RunStateWriter", "Tell"]

_log = logging.getLogger(__name__)
_TRY_AGAIN_S = 1.0
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, None)

Tell = Callable[[str, RunEvent], None]
"""Given a run's id and what happened to it, after it is on disk."""


class RunStateWriter:
    """Who writes down what happens to one run, one thing at a time."""

    def __init__(
        self, home: Home, registry: Registry, record: RunRecord, clock: Callable[[], float], tell: Tell
    ) -> None:
        self._home, self._registry = home, registry
        self._clock, self._tell = clock, tell
        self._life = RunEventLog(home.run(record.run_id))
        self._writing = asyncio.Lock()
        self.record = record

    @property
    def run_id(self) -> str:
        """Whose book it is."""
        return self.record.run_id

    @property
    def paths(self) -> RunDirectory:
        """Where the run is."""
        return self._home.run(self.record.run_id)

    @property
    def phase(self) -> Phase:
        """Where the run is in its life."""
        return self.record.phase

    async def happened(
        self,
        happening: PhaseEvent,
        *,
        reason: str = "",
        code: str = "",
        facts: dict[str, Any] | None = None,
        at: float | None = None,
        **columns: Any,
    ) -> RunRecord:
        """Take the run to its next phase. `IllegalTransition` when that cannot happen to it."""
        async with self._writing:
            phase = advance(self.record.phase, happening)
            row = replace(self.record, phase=phase, reason=reason, code=code, **columns)
            await self._write(happening, row, reason, code, facts or {}, at)
            return self.record

    async def cancel_resume(self, why: str) -> bool:
        """Take a run that waits back to how it had ended before; False when it was never resumed."""
        async with self._writing:
            before = outcome_before(await asyncio.to_thread(self._life.read))
            if self.record.phase is not Phase.QUEUED or before is None:
                return False
            reason = f"{before.reason}; it was not resumed: {why}" if before.reason else f"it was not resumed: {why}"
            facts = {name: value for name, value in before.facts.items() if name != "last_lines"}
            facts.setdefault("ended", before.time)
            happened = RunEvent(
                0, self._clock(), before.attempt, str(PhaseEvent.RESUME_CANCELLED), before.phase, reason, before.code,
                facts,
            )  # fmt: skip
            written = await self._patiently(lambda: self._life.append(happened))
            # The directory tells the rest: when it began and ended, and how far it had come.
            told = await asyncio.to_thread(read_run, self.paths)
            self.record = told or replace(self.record, phase=before.phase, reason=reason, code=before.code)
            await self._patiently(self._index)
            self._tell(self.run_id, written)
            return True

    async def noted(self, what: str, *, reason: str = "", code: str = "", facts: dict[str, Any] | None = None) -> None:
        """Write down something that changes no phase: `alarm`, `alarm_over`, `adopted`, `note`."""
        async with self._writing:
            await self._write(what, self.record, reason, code, facts or {})

    async def update(self, **columns: Any) -> None:
        """Change columns of the row that the life does not know."""
        async with self._writing:
            row = replace(self.record, **columns)
            if row != self.record:
                self.record = row
                await self._patiently(self._index)

    async def _write(
        self, happening: str, row: RunRecord, reason: str, code: str, facts: dict[str, Any], at: float | None = None
    ) -> None:
        now = self._clock() if at is None else at
        record = RunEvent(0, now, row.attempt, str(happening), row.phase, reason, code, facts)
        written = await self._patiently(lambda: self._life.append(record))
        self.record = row
        await self._patiently(self._index)
        self._tell(self.run_id, written)

    def _index(self) -> None:
        try:
            try:
                self._registry.put(self.record)
            except RegistryCorrupt:
                rebuild_if_damaged(self._home, self._registry)
                self._registry.put(self.record)
        except sqlite3.OperationalError:
            raise
        except (sqlite3.Error, PalaestraError, ValueError, TypeError, OverflowError):
            # An index is not worth a run: the life has it, and the next service reads it from there.
            _log.exception("%s: its row could not be written", self.run_id)

    async def _patiently(self, write: Callable[[], Any]) -> Any:
        told = False
        while True:
            try:
                return await asyncio.to_thread(write)
            except sqlite3.OperationalError as error:
                problem = f"the registry cannot be written ({error}); it is tried again every second"
                if "locked" in str(error):
                    problem = "the registry is held by another process; it is tried again every second"
            except OSError as error:
                if error.errno not in _NO_SPACE:
                    raise
                problem = f"{error}; what is to be written waits for space"
            if not told:
                _log.warning("%s: %s", self.run_id, problem)
                told = True
            await asyncio.sleep(_TRY_AGAIN_S)
