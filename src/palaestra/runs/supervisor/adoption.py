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


def remove_unfinished(home: Home) -> None:
    """Remove directories and archives that a killed service was creating or removing."""
    for path in home.runs.glob(".*"):
        if path.is_dir() and path.suffix in (".new", ".restore", ".gone"):
            shutil.rmtree(path, ignore_errors=True)
    remove_stale_files(home.runs)
    for path in home.archive.glob(".*.new"):
        path.unlink(missing_ok=True)


def find_live_runs(home: Home, registry: Registry) -> tuple[list[RunRecord], int]:
    """The runs that have not ended according to their event logs, oldest first, and the number of unsupervised runs.

    Rows of the registry that differ are corrected.
    """
    rows = {row.run_id: row for row in registry.runs()}
    live: list[RunRecord] = []
    corrected: list[RunRecord] = []
    unsupervised = 0
    for path in home.runs.iterdir():
        if path.name.startswith("."):
            continue
        run, row = home.run(path.name), rows.pop(path.name, None)
        try:
            current, is_live = _read_current(run, row)
            unsupervised += current is not None and not run.spec.exists()
        except Exception as error:  # noqa: BLE001 - one directory must not keep the service from starting
            _log.warning("%s: left alone, because it cannot be read: %s: %s", path.name, type(error).__name__, error)
            continue
        if current is not None and current != row:
            corrected.append(current)
        if current is not None and is_live:
            live.append(current)
    for row in rows.values():
        archived = read_archived_run(home.archive / f"{row.run_id}.json")
        if archived is not None:
            # The service was killed between packing the run and updating its row.
            corrected.append(archived)
        elif not row.phase.has_ended:
            corrected.append(replace(row, phase=Phase.LOST, reason="its directory is gone", code="no_directory"))
    registry.put_many(corrected)
    return sorted(live, key=lambda run: run.created), unsupervised


def _read_current(run: RunDirectory, row: RunRecord | None) -> tuple[RunRecord | None, bool]:
    """The true row of a run, and whether the service has to supervise it."""
    if not run.spec.exists():
        return read_run(run), False
    log = RunEventLog(run)
    events = log.read()
    phase = current_phase(events)
    if row is None or row.phase is not phase:
        # The service was killed between the event log and the registry: the log is right.
        stored = read_run(run)
        row = None if stored is None else replace(stored, phase=phase)
    # A damaged log may end with the previous attempt while the next one is running.
    is_live = not phase.has_ended or (log.corrupt_lines > 0 and find_unrecorded_attempt(run, events) is not None)
    return row, is_live
