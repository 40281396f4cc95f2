"""What happened to a run, one line each, in the order it happened: the memory that the phase is computed from."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from palaestra.files.atomic import append_line
from palaestra.files.run_directory import RunDirectory
from palaestra.processes.procfs import boot_id
from palaestra.runs.phase import Happening, Phase
from palaestra.runs.record import RunEvent

__all__ = ["RunEventLog", "elapsed", "outcomes", "phase_of"]

_SCHEMA = 1


class RunEventLog:
    """The life of one run. One process writes it; anybody reads it."""

    def __init__(self, paths: RunDirectory) -> None:
        self._path = paths.life
        self._last: int | None = None
        self.corrupt_lines = 0
        """Lines of the last reading that held no record: torn by a crash, damaged, or of a later schema."""

    def append(self, record: RunEvent, durable: bool = True) -> RunEvent:
        """Add one happening and answer it with its number. When this returns, it outlives a power cut."""
        if self._last is None:
            self._last = max((known.seq for known in self.read()), default=0)
        numbered = replace(record, seq=self._last + 1)
        line = {
            "schema": _SCHEMA,
            "seq": numbered.seq,
            "time": numbered.time,
            "boottime": time.clock_gettime(time.CLOCK_BOOTTIME),
            "boot_id": boot_id(),
            "attempt": numbered.attempt,
            "happening": numbered.happening,
            "phase": str(numbered.phase),
            "reason": numbered.reason,
            "code": numbered.code,
            "facts": numbered.facts,
        }
        append_line(self._path, line, durable=durable)
        self._last = numbered.seq
        return numbered

    def read(self, after: int = 0) -> list[RunEvent]:
        """What happened since a number."""
        self.corrupt_lines = 0
        records = []
        for data in self._lines():
            record = _record(data)
            if record is None:
                self.corrupt_lines += 1
            elif record.seq > after:
                records.append(record)
        return records

    def _lines(self) -> list[dict[str, Any] | None]:
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return []
        return [_parsed(line) for line in text.split(b"\n") if line]


def phase_of(records: Iterable[RunEvent]) -> Phase:
    """Where a life leads to; a run of which nothing is known waits."""
    phase = Phase.QUEUED
    for record in records:
        phase = record.phase
    return phase


def outcomes(records: Iterable[RunEvent]) -> dict[int, RunEvent]:
    """How each attempt ended, by its number; a resume that never began changes none of them."""
    ends = frozenset(Happening) - {Happening.RESUME_CANCELLED}
    return {record.attempt: record for record in records if record.happening in ends and record.phase.ended}


def elapsed(started: float | None, ended: float | None, now: float) -> float:
    """Seconds between two times of a record, never negative, whatever was done to the clock."""
    return 0.0 if started is None else max(0.0, (now if ended is None else ended) - started)


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(line)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def _record(data: dict[str, Any] | None) -> RunEvent | None:
    try:
        if data is None or int(data["schema"]) > _SCHEMA:
            return None
        return RunEvent(
            seq=int(data["seq"]),
            time=float(data["time"]),
            attempt=int(data["attempt"]),
            happening=str(data["happening"]),
            phase=Phase(data["phase"]),
            reason=str(data.get("reason", "")),
            code=str(data.get("code", "")),
            facts=dict(data.get("facts") or {}),
        )
    except (KeyError, TypeError, ValueError):
        return None
