"""What an earlier service left: read from the run directories, with the registry put right where it fell behind."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass, field, replace
from typing import Any

from palaestra.files.atomic import remove_stale_files
from palaestra.files.home import Home
from palaestra.files.run_directory import RunDirectory
from palaestra.runs.phase import Phase
from palaestra.runs.process.attempt_process import find_unrecorded_attempt
from palaestra.runs.record import RunRecord
from palaestra.runs.state.event_log import RunEventLog, current_phase
from palaestra.runs.store.rebuild import read_archived_run, read_run
from palaestra.runs.store.registry import Registry

__all__ = ["AdoptionReport", "Found", "found_on_disk", "remove_unfinished"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdoptionReport:
    """What a service found when it started."""

    adopted: tuple[str, ...] = ()
    """Runs whose processes go on."""
    queued: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    """Runs that were about to start, and start now."""
    ended: tuple[str, ...] = ()
    """Runs that ended while nobody looked."""
    left_alone: tuple[str, ...] = ()
    """Runs that could not be read or written; the log of the service says why."""
    unsupervised: int = 0
    """Runs of `palaestra train` alone."""

    def adding(self, run_id: str, how: str) -> AdoptionReport:
        """With one more."""
        found: Any = {how: (*getattr(self, how), run_id)}
        return replace(self, **found)


@dataclass
class Found:
    """What there is to go on with, oldest first."""

    live: list[RunRecord] = field(default_factory=list)
    unsupervised: int = 0


def remove_unfinished(home: Home) -> None:
    """Directories that a killed service was making or removing, and archives it was writing."""
    for path in home.runs.glob(".*"):
        if path.is_dir() and path.suffix in (".new", ".restore", ".gone"):
            shutil.rmtree(path, ignore_errors=True)
    remove_stale_files(home.runs)
    for path in home.archive.glob(".*.new"):
        path.unlink(missing_ok=True)


def found_on_disk(home: Home, registry: Registry) -> Found:
    """Every run that is not over, by its own life. Rows that say otherwise are corrected."""
    rows = {row.run_id: row for row in registry.runs()}
    found = Found()
    changed: list[RunRecord] = []
    for path in home.runs.iterdir():
        if path.name.startswith("."):
            continue
        try:
            _look_at(home.run(path.name), rows.pop(path.name, None), found, changed)
        except Exception as error:  # noqa: BLE001 - one directory must not keep the service from starting
            _log.warning("%s: left alone, because it cannot be read: %s: %s", path.name, type(error).__name__, error)
    for row in rows.values():
        packed = read_archived_run(home.archive / f"{row.run_id}.json")
        if packed is not None:
            # Killed after it was packed and before that was written down.
            changed.append(packed)
        elif not row.phase.has_ended:
            changed.append(replace(row, phase=Phase.LOST, reason="its directory is gone", code="no_directory"))
    registry.put_many(changed)
    found.live.sort(key=lambda run: run.created)
    return found


def _look_at(run: RunDirectory, row: RunRecord | None, found: Found, changed: list[RunRecord]) -> None:
    if not run.spec.exists():
        alone = read_run(run)
        found.unsupervised += alone is not None
        if alone is not None and alone != row:
            changed.append(alone)
        return
    log = RunEventLog(run)
    life = log.read()
    phase = current_phase(life)
    if row is None or row.phase is not phase:
        # Killed between the log and the index: the log is right.
        told = read_run(run)
        if told is None:
            return
        row = replace(told, phase=phase)
        changed.append(row)
    # The end of one attempt is the last that a damaged log may tell, while the next one goes on.
    if not phase.has_ended or (log.corrupt_lines and find_unrecorded_attempt(run, life) is not None):
        found.live.append(row)
