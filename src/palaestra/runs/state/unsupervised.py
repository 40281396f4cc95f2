"""Runs that somebody started with `palaestra train` alone: shown like any other, never stopped by us.

Such a run has no spec, no warden and no life log. Who trains holds the lock of the journal; how far the run is and what
became of it is what the journal says last.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from palaestra.files.atomic import read_json
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.processes.procfs import ProcessIdentity
from palaestra.runs.phase import Phase
from palaestra.runs.record import Alarm, RunRecord
from palaestra.runs.state.alarms import non_finite_text
from palaestra.runs.state.journal_tail import Told, told_by

__all__ = ["journal_holder", "read_unsupervised"]

_LAST_WORDS = {"succeeded": Phase.SUCCEEDED, "failed": Phase.FAILED, "stopped": Phase.STOPPED}


def read_unsupervised(run: RunDirectory) -> RunRecord | None:
    """Such a run as a row; None when the directory is not one of a run."""
    resolved = read_json(run.resolved)
    attempts = run.attempts()
    if resolved is None or not attempts or run.spec.exists():
        return None
    newest = attempts[-1]
    trainer = journal_holder(newest)
    told = told_by(newest.journal)
    phase, reason = _phase(told, trainer)
    if not told.env_step and len(attempts) > 1:
        # It has just been resumed; what it goes on from is what the attempt before it said.
        told = told_by(attempts[-2].journal)
    text = non_finite_text(told.non_finite, seen_from_the_start=False) if told.non_finite else ""
    changed = _changed(newest.journal, 0.0)
    algorithm = _at(resolved, "algorithm", "name")
    seed, total = _at(resolved, "trainer", "seed"), _at(resolved, "trainer", "total_timesteps")
    created = run.path.stat().st_mtime
    for early in (run.config, attempts[0].command):
        if early.exists():
            created = early.stat().st_mtime
            break
    return RunRecord(
        run_id=run.run_id,
        runner="palaestra",
        agent_id=f"palaestra/{algorithm}" if algorithm else "palaestra",
        env_id=_environment(resolved),
        phase=phase,
        reason=reason,
        code="" if trainer else "journal",
        attempt=newest.number,
        supervised=False,
        created=created,
        started=created,
        ended=None if trainer else _changed(newest.journal, created),
        trainer=trainer,
        env_step=told.env_step,
        total_steps=total if isinstance(total, int) else None,
        episodes=told.episodes,
        episode_return=told.episode_return,
        seed=seed if isinstance(seed, int) else None,
        alarms=(Alarm("non_finite", text, changed),) if text else (),
    )


def journal_holder(attempt: Attempt) -> ProcessIdentity | None:
    """Who is writing an attempt's journal: the process named in its lock file, if it does hold the lock."""
    lock = attempt.journal.with_name(f".{attempt.journal.name}.lock")
    try:
        pid, inode = int(lock.read_text()), lock.stat().st_ino
        # Asking by taking the lock would, for a moment, refuse it to a trainer that is just beginning.
        held = [line.split() for line in Path("/proc/locks").read_text().splitlines() if " FLOCK " in line]
    except (OSError, ValueError):
        return None
    for words in held:
        if words[4] == str(pid) and words[5].rpartition(":")[2] == str(inode):
            return ProcessIdentity.of(pid)
    return None


def _phase(told: Told, trainer: ProcessIdentity | None) -> tuple[Phase, str]:
    if trainer is not None:
        return Phase.RUNNING, ""
    if told.phase in _LAST_WORDS:
        return _LAST_WORDS[told.phase], "as its journal says"
    return Phase.LOST, "it is gone and nobody saw it exit"


def _environment(resolved: dict[str, Any]) -> str:
    tasks = resolved.get("tasks")
    if isinstance(tasks, list) and tasks and isinstance(tasks[0], dict):
        return str(tasks[0].get("task", ""))
    return str(_at(resolved, "env", "id") or "")


def _at(data: dict[str, Any], *path: str) -> Any:
    found: Any = data
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _changed(path: Path, otherwise: float) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return otherwise
