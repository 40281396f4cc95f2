"""The event log of a run (events.jsonl): every phase change, alarm and note, from which the phase is computed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import replace

from palaestra.files.atomic import append_line
from palaestra.files.run_directory import RunDirectory
from palaestra.processes.procfs import boot_id
from palaestra.runs.phase import Phase, PhaseEvent
from palaestra.runs.record import RunEdit, RunEvent
from palaestra.runs.wire import upgrade_names

EDITED = "edited"
"""Kind of the events that hold a `RunEdit`."""
_SCHEMA = 1
_END_KINDS = frozenset(PhaseEvent) - {PhaseEvent.RESUME_CANCELLED}


class RunEventLog:
    """The events of one run. One process writes, any process may read."""

    def __init__(self, paths: RunDirectory) -> None:
        # Earlier versions called it life.jsonl. The name stays: their service may still be writing it.
        earlier = paths.path / "life.jsonl"
        self._path = earlier if earlier.exists() else paths.events
        self._last: int | None = None
        self.corrupt_lines = 0
        """Lines of the last read that hold no event: torn by a crash, damaged, or of a later schema."""

    def append(self, event: RunEvent, durable: bool = True) -> RunEvent:
        """Append an event and return it with its number. If `durable`, it survives a power cut."""
        if self._last is None:
            self._last = max((known.seq for known in self.read()), default=0)
        numbered = replace(event, seq=self._last + 1)
        line = {
            "schema": _SCHEMA,
            "seq": numbered.seq,
            "time": numbered.time,
            "boottime": time.clock_gettime(time.CLOCK_BOOTTIME),
            "boot_id": boot_id(),
            "attempt": numbered.attempt,
            "kind": numbered.kind,
            "phase": str(numbered.phase),
            "reason": numbered.reason,
            "code": numbered.code,
            "facts": numbered.facts,
        }
        append_line(self._path, line, durable=durable)
        self._last = numbered.seq
        return numbered

    def read(self, after: int = 0) -> list[RunEvent]:
        """The events after a sequence number."""
        try:
            lines = self._path.read_bytes().split(b"\n")
        except FileNotFoundError:
            lines = []
        events = [_parse_event(line) for line in lines if line]
        self.corrupt_lines = events.count(None)
        return [event for event in events if event is not None and event.seq > after]


def current_phase(events: Iterable[RunEvent]) -> Phase:
    """The phase after the last event; a run without events is queued."""
    phase = Phase.QUEUED
    for event in events:
        phase = event.phase
    return phase


def attempt_outcomes(events: Iterable[RunEvent]) -> dict[int, RunEvent]:
    """The event that ended each attempt, by attempt number; a cancelled resume changes none of them."""
    return {event.attempt: event for event in events if event.kind in _END_KINDS and event.phase.has_ended}


def outcome_before_resume(events: Iterable[RunEvent]) -> RunEvent | None:
    """How the run had ended when it was last resumed; None if it never was."""
    last: RunEvent | None = None
    before: RunEvent | None = None
    for event in events:
        if event.kind == PhaseEvent.RESUMED:
            before = last
        elif event.kind in _END_KINDS and event.phase.has_ended:
            last = event
    return before


def read_edits(events: Iterable[RunEvent]) -> RunEdit:
    """What people changed about a run, as of the last event."""
    edits = RunEdit()
    for event in events:
        if event.kind != EDITED:
            continue
        name, tags, notes, favorite = (event.facts.get(key) for key in ("name", "tags", "notes", "favorite"))
        if isinstance(name, str):
            edits["name"] = name
        if isinstance(tags, list):
            edits["tags"] = tuple(str(tag) for tag in tags)
        if isinstance(notes, str):
            edits["notes"] = notes
        if isinstance(favorite, bool):
            edits["favorite"] = favorite
    return edits


def duration_s(started: float | None, ended: float | None, now: float) -> float:
    """Seconds from start to end or now; never negative, even if the clock was changed."""
    return 0.0 if started is None else max(0.0, (now if ended is None else ended) - started)


def _parse_event(line: bytes) -> RunEvent | None:
    try:
        data = upgrade_names(json.loads(line))
        if int(data["schema"]) > _SCHEMA:
            return None
        return RunEvent(
            seq=int(data["seq"]),
            time=float(data["time"]),
            attempt=int(data["attempt"]),
            kind=str(data["kind"]),
            phase=Phase(data["phase"]),
            reason=str(data.get("reason", "")),
            code=str(data.get("code", "")),
            facts=upgrade_names(data.get("facts") or {}),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
