"""Finds what an earlier service left in the run directories and corrects the registry where it is behind."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass, field, replace

from palaestra.files.atomic import remove_stale_files
from palaestra.files.home import Home
from palaestra.files.run_directory import RunDirectory
from palaestra.runs.phase import Phase
from palaestra.runs.process.attempt_process import find_unrecorded_attempt
from palaestra.runs.record import RunRecord
from palaestra.runs.state.event_log import RunEventLog, current_phase
from palaestra.runs.store.rebuild import read_archived_run, read_run
from palaestra.runs.store.registry import Registry

__all__ = ["AdoptionReport", "LiveRuns", "find_live_runs", "remove_unfinished"]

_log = logging.getLogger(__name__)


@dataclass
class AdoptionReport:
    """What a service found when it started."""

    adopted: list[str] = field(default_factory=list)
    """Runs whose processes are alive."""
    queued: list[str] = field(default_factory=list)
    relaunched: list[str] = field(default_factory=list)
    """Runs that were about to be launched, and are launched now."""
    ended: list[str] = field(default_factory=list)
    """Runs that ended while no service was running."""
    skipped: list[str] = field(default_factory=list)
    """Runs that could not be read or written; the log of the service has the reason."""
    unsupervised: int = 0
    """Number of runs started with `palaestra train`."""


@dataclass
class LiveRuns:
    """The runs that have not ended, oldest first."""

    records: list[RunRecord] = field(default_factory=list)
    unsupervised: int = 0


def remove_unfinished(home: Home) -> None:
    """Remove directories and archives that a killed service was creating or removing."""
    for path in home.runs.glob(".*"):
        if path.is_dir() and path.suffix in (".new", ".restore", ".gone"):
            shutil.rmtree(path, ignore_errors=True)
    remove_stale_files(home.runs)
    for path in home.archive.glob(".*.new"):
        path.unlink(missing_ok=True)


def find_live_runs(home: Home, registry: Registry) -> LiveRuns:
    """Find every run that has not ended according to its event log, and correct rows that differ."""
    rows = {row.run_id: row for row in registry.runs()}
    live = LiveRuns()
    corrected: list[RunRecord] = []
    for path in home.runs.iterdir():
        if path.name.startswith("."):
            continue
        try:
            _check_run(home.run(path.name), rows.pop(path.name, None), live, corrected)
        except Exception as error:  # noqa: BLE001 - one directory must not keep the service from starting
            _log.warning("%s: left alone, because it cannot be read: %s: %s", path.name, type(error).__name__, error)
    for row in rows.values():
        archived = read_archived_run(home.archive / f"{row.run_id}.json")
        if archived is not None:
            # The service was killed between packing the run and updating its row.
            corrected.append(archived)
        elif not row.phase.has_ended:
            corrected.append(replace(row, phase=Phase.LOST, reason="its directory is gone", code="no_directory"))
    registry.put_many(corrected)
    live.records.sort(key=lambda run: run.created)
    return live


def _check_run(run: RunDirectory, row: RunRecord | None, live: LiveRuns, corrected: list[RunRecord]) -> None:
    if not run.spec.exists():
        unsupervised = read_run(run)
        live.unsupervised += unsupervised is not None
        if unsupervised is not None and unsupervised != row:
            corrected.append(unsupervised)
        return
    log = RunEventLog(run)
    events = log.read()
    phase = current_phase(events)
    if row is None or row.phase is not phase:
        # The service was killed between the event log and the registry: the log is right.
        stored = read_run(run)
        if stored is None:
            return
        row = replace(stored, phase=phase)
        corrected.append(row)
    # A damaged log may end with the previous attempt while the next one is running.
    if not phase.has_ended or (log.corrupt_lines and find_unrecorded_attempt(run, events) is not None):
        live.records.append(row)
