"""Runs started with `palaestra train` instead of the service: listed like any other, never stopped by the service.

Such a run has no spec and no watchdog, and its event log holds only what people changed about it. The trainer holds the
lock of the journal; progress and outcome come from the end of the journal. Reading them costs the same however long the
run is, and imports nothing heavy.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palaestra.files.atomic import read_json
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.processes.procfs import ProcessIdentity
from palaestra.runs.phase import Phase
from palaestra.runs.record import Alarm, RunRecord, digest_config
from palaestra.runs.state.alarms import describe_non_finite
from palaestra.runs.state.attempt_files import read_tail
from palaestra.runs.state.event_log import RunEventLog, read_edits
from palaestra.runs.state.progress import NonFiniteMetric, NonFiniteTracker
from palaestra.runs.wire import JsonObject
from palaestra.strict_json import optional_number, read_numbers

_FINAL_PHASES = {"succeeded": Phase.SUCCEEDED, "failed": Phase.FAILED, "stopped": Phase.STOPPED}
_TAIL_BYTES = 1 << 18
_LONG_TAIL_BYTES = 1 << 23
_EPISODES = 100
_MAX_COUNT = 2**63
_EPISODE, _UPDATE, _PHASE = _KINDS = (b'"EpisodeSummary"', b'"TrainingStep"', b'"PhaseChanged"')


@dataclass
class JournalSummary:
    """Progress and outcome of a run as far as the end of its journal shows."""

    phase: str = ""
    """The last phase reported by the trainer."""
    env_step: int = 0
    episodes: int = 0
    episode_return: float | None = None
    """Mean of the last 100 episodes."""
    non_finite: tuple[NonFiniteMetric, ...] = ()
    """Metrics of the last update that are NaN or infinite."""


def read_unsupervised(run: RunDirectory) -> RunRecord | None:
    """The row of such a run; None if the directory does not hold one."""
    resolved = read_json(run.resolved)
    attempts = run.attempts()
    if resolved is None or not attempts or run.spec.exists():
        return None
    newest = attempts[-1]
    resolved = read_json(newest.resolved) or resolved  # a resume may have changed it
    trainer = find_journal_writer(newest)
    summary = summarize_journal(newest.journal)
    if trainer is not None:
        phase, reason = Phase.RUNNING, ""
    elif summary.phase in _FINAL_PHASES:
        phase, reason = _FINAL_PHASES[summary.phase], "according to its journal"
    else:
        phase, reason = Phase.LOST, "the process is gone and its exit was not observed"
    if not summary.env_step and len(attempts) > 1:
        # Just resumed: show the progress of the previous attempt.
        summary = summarize_journal(attempts[-2].journal)
    text = describe_non_finite(summary.non_finite, seen_from_the_start=False) if summary.non_finite else ""
    algorithm = _get(resolved, "algorithm", "name")
    seed, total = _get(resolved, "trainer", "seed"), _get(resolved, "trainer", "total_timesteps")
    first = next((path for path in (run.config, attempts[0].command) if path.exists()), run.path)
    created = first.stat().st_mtime
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
        ended=None if trainer else _modification_time(newest.journal, created),
        trainer=trainer,
        env_step=summary.env_step,
        total_steps=total if isinstance(total, int) else None,
        episodes=summary.episodes,
        episode_return=summary.episode_return,
        seed=seed if isinstance(seed, int) else None,
        alarms=(Alarm("non_finite", text, _modification_time(newest.journal, 0.0)),) if text else (),
        config_digest=digest_config(_environment(resolved), {}, resolved),
        # The only events of such a run are those of people.
        **read_edits(RunEventLog(run).read()),
    )


def may_have_changed(row: RunRecord, run: RunDirectory) -> bool:
    """Whether a row of such a run may be out of date: it was running, or `palaestra train --resume` continued it."""
    return not row.supervised and (not row.phase.has_ended or run.attempt(row.attempt + 1).path.exists())


def find_journal_writer(attempt: Attempt) -> ProcessIdentity | None:
    """The process that writes the journal of an attempt: the one in its lock file, if it holds the lock."""
    lock = attempt.journal.with_name(f".{attempt.journal.name}.lock")
    try:
        pid, inode = int(lock.read_text()), lock.stat().st_ino
        # Testing by taking the lock would refuse it, for a moment, to a trainer that is just starting.
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines() if " FLOCK " in line]
    except (OSError, ValueError):
        return None
    for words in locks:
        if words[4] == str(pid) and words[5].rpartition(":")[2] == str(inode):
            return ProcessIdentity.of(pid)
    return None


def summarize_journal(journal: Path) -> JournalSummary:
    """Read the end of a journal; the summary of a missing journal is empty."""
    summary, returns, seen = JournalSummary(), list[float](), set[bytes]()
    tail = read_tail(journal, _TAIL_BYTES)
    if _UPDATE not in tail and len(tail) == _TAIL_BYTES:
        # One update with ten thousand metrics is longer than the short tail.
        tail = read_tail(journal, _LONG_TAIL_BYTES)
    for line in reversed(tail.split(b"\n")):
        kind = next((kind for kind in _KINDS if kind in line), None)
        if kind is None or (kind in seen and kind != _EPISODE):
            continue
        try:
            data = json.loads(line)
        except ValueError:
            continue
        if not isinstance(data, dict):
            continue
        seen.add(kind)
        summary.env_step = max(summary.env_step, _count(data, "env_step"))
        if kind == _EPISODE:
            summary.episodes = max(summary.episodes, _count(data, "episode"))
            if len(returns) < _EPISODES:
                value = optional_number(data.get("episode_return"))
                returns.append(math.nan if value is None else value)
        elif kind == _UPDATE:
            metrics = data.get("metrics")
            tracker = NonFiniteTracker()
            tracker.update(_count(data, "env_step"), read_numbers(metrics) if isinstance(metrics, dict) else {})
            summary.non_finite = tracker.current()
        elif kind == _PHASE:
            summary.phase = str(data.get("phase", ""))
        if len(returns) == _EPISODES and len(seen) == len(_KINDS):
            break
    summary.episode_return = sum(returns) / len(returns) if returns else None
    return summary


def _environment(resolved: JsonObject) -> str:
    tasks = resolved.get("tasks")
    if isinstance(tasks, list) and tasks and isinstance(tasks[0], dict):
        return str(tasks[0].get("task", ""))
    return str(_get(resolved, "env", "id") or "")


def _get(data: Any, *path: str) -> Any:
    for name in path:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _count(data: JsonObject, name: str) -> int:
    value = data.get(name, 0)
    return value if isinstance(value, int) and 0 <= value < _MAX_COUNT else 0


def _modification_time(path: Path, otherwise: float) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return otherwise
