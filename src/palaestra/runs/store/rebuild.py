"""The registry made anew from the run directories: what a damaged or missing file costs is the time to read them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from palaestra.files.atomic import read_json
from palaestra.files.home import Home
from palaestra.files.run_directory import RunDirectory
from palaestra.processes.procfs import ProcessIdentity
from palaestra.redaction import Redactor
from palaestra.runs.phase import PhaseEvent, determine_outcome
from palaestra.runs.record import Alarm, CheckpointRecord, RunEvent, RunRecord, fit_record
from palaestra.runs.state.attempt_plan import AttemptPlan
from palaestra.runs.state.attempt_status import read_exit_facts, read_status
from palaestra.runs.state.event_log import RunEventLog, current_phase
from palaestra.runs.state.unsupervised import read_unsupervised
from palaestra.runs.store.database import RegistryCorrupt, set_aside
from palaestra.runs.store.registry import ROW_FAULTS, Registry
from palaestra.runs.wire import from_json
from palaestra.strict_json import optional_number

__all__ = ["RebuildReport", "open_registry", "read_packed", "read_run", "rebuild", "recover"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RebuildReport:
    """What a rebuild found."""

    runs: int
    checkpoints: int
    unreadable: tuple[str, ...] = ()
    """Directories under runs/ that hold no run we can read."""
    set_aside: Path | None = None
    """Where the damaged file is now."""


def open_registry(home: Home) -> Registry:
    """The registry to write. Damaged or missing, it is rebuilt from the run directories, with one warning."""
    fresh = not home.registry.exists()
    aside: Path | None = None
    try:
        registry = Registry.open(home.registry)
    except RegistryCorrupt as error:
        aside = set_aside(home.registry)
        _log.warning("the registry was damaged (%s); it was moved to %s and is being rebuilt", error, aside)
        registry = Registry.open(home.registry)
    if fresh or aside is not None:
        report = rebuild(home, registry)
        if aside is not None:
            _log.warning("rebuilt the registry from %d run directories", report.runs)
    return registry


def recover(home: Home, registry: Registry) -> RebuildReport:
    """What to do when a registry that is open turns out to be damaged or gone: set it aside and make it anew.

    Harmless when repeated: who comes second finds it whole.
    """
    with registry.repairing:
        if registry.sound():
            return RebuildReport(0, 0)
        aside = registry.replace()
        report = rebuild(home, registry)
    if aside.exists():
        told = "the registry was damaged; it was moved to %s and rebuilt from %d run directories"
        _log.warning(told, aside, report.runs)
    else:
        _log.warning("the registry was removed; it was rebuilt from %d run directories", report.runs)
    return replace(report, set_aside=aside if aside.exists() else None)


def rebuild(home: Home, registry: Registry) -> RebuildReport:
    """Put every run and every imported checkpoint that the directories hold into the registry."""
    found: list[RunRecord] = []
    unreadable: list[str] = []
    for path in sorted(home.runs.iterdir()) if home.runs.is_dir() else []:
        if path.name.startswith("."):
            continue
        record = read_run(RunDirectory(path))
        if record is None:
            unreadable.append(path.name)
        else:
            found.append(record)
    lying = {record.run_id for record in found}
    for note in sorted(home.archive.glob("*.json")):
        archived = read_packed(note)
        # A run beside its package is whole: somebody was interrupted while packing or unpacking.
        if archived is not None and archived.run_id not in lying:
            found.append(archived)
    registry.put_many(found)
    imported = 0
    for note in sorted(home.checkpoints.glob("*/record.json")):
        checkpoint = _checkpoint(note)
        try:
            if checkpoint is not None:
                registry.put_checkpoint(checkpoint)
                imported += 1
        except ROW_FAULTS as error:
            _log.warning("%s: its row cannot be written: %s", note.parent, error)
    return RebuildReport(len(found), imported, tuple(unreadable))


def read_run(run: RunDirectory) -> RunRecord | None:
    """A run's row as its directory tells it; None when it holds no run, or none that can be read."""
    try:
        record = _read_run(run)
    except Exception as error:  # noqa: BLE001 - what ails one directory must not hide the others
        _log.warning("%s: its directory cannot be read: %s: %s", run.run_id, type(error).__name__, error)
        return None
    return None if record is None else fit_record(record)


def _read_run(run: RunDirectory) -> RunRecord | None:
    spec = read_json(run.spec)
    if spec is None:
        if not run.spec.exists():
            return read_unsupervised(run)
        # What was asked for is damaged; what happened is still on record.
        spec = {}
    life = RunEventLog(run).read()
    last = _last_change(life)
    attempts = run.attempts()
    if life:
        # An attempt that was prepared and never launched is not on record, and its number is used again.
        attempts = [attempt for attempt in attempts if attempt.number <= life[-1].attempt]
    newest = attempts[-1] if attempts else None
    plan = (AttemptPlan.read(newest) if newest else None) or _asked(spec, life)
    launched = _last(life, PhaseEvent.LAUNCHED)
    watchdog: ProcessIdentity | None = None
    trainer: ProcessIdentity | None = None
    phase, reason, code = current_phase(life), last.reason if last else "", last.code if last else ""
    ended = _ended(launched, last) if phase.has_ended else None
    if phase.has_process and newest is not None:
        status = read_status(newest)
        watchdog, trainer = status.watchdog, status.trainer
        if not status.alive and status.exit is not None:
            # No service recorded the end; the watchdog did.
            outcome = determine_outcome(read_exit_facts(newest, Redactor()))
            phase, reason, code = outcome.phase, outcome.reason, outcome.code
            ended = float(status.exit.get("ended", 0.0)) or None
    runner = str(spec.get("runner", ""))
    numbers = next((record.facts for record in reversed(life) if "env_step" in record.facts), {})
    seed, priority, tags = spec.get("seed"), spec.get("priority"), spec.get("tags")
    return RunRecord(
        run_id=run.run_id,
        runner=runner,
        agent_id=f"{runner}/{plan.algorithm}" if plan.algorithm else runner,
        env_id=plan.env_id,
        phase=phase,
        reason=reason,
        code=code,
        attempt=newest.number if newest else 0,
        priority=priority if isinstance(priority, int) else 0,
        created=life[0].time if life else run.spec.stat().st_mtime,
        started=launched.time if launched else None,
        ended=ended,
        warden=watchdog,
        trainer=trainer,
        env_step=numbers.get("env_step") or 0,
        total_steps=plan.total_steps,
        episodes=numbers.get("episodes") or 0,
        episode_return=optional_number(numbers.get("episode_return")),
        seed=seed if isinstance(seed, int) else None,
        tags=tuple(str(tag) for tag in tags) if isinstance(tags, list) else (),
        alarms=_alarms(last) if phase.has_ended and last is not None else (),
        tracking_url=str(numbers.get("tracking_url") or ""),
        bytes_on_disk=numbers.get("bytes_on_disk") or 0,
    )


def _alarms(end: RunEvent) -> tuple[Alarm, ...]:
    """Alarms about its numbers that a run ended with."""
    found = end.facts.get("alarms")
    return tuple(
        Alarm(str(one["code"]), str(one["text"]), float(one["since"]))
        for one in (found if isinstance(found, list) else ())
        if isinstance(one, dict) and {"code", "text", "since"} <= one.keys()
    )


def _asked(spec: dict[str, Any], life: list[RunEvent]) -> AttemptPlan:
    """What is known of a run that has no attempt yet."""
    facts = next((record.facts for record in life if "algorithm" in record.facts), {})
    steps = facts.get("total_steps")
    return AttemptPlan(
        env_id=str(facts.get("env_id") or spec.get("env_id") or ""),
        algorithm=str(facts.get("algorithm") or ""),
        total_steps=steps if isinstance(steps, int) else None,
    )


def _ended(launched: RunEvent | None, last: RunEvent | None) -> float | None:
    """When the trainer ended, as its watchdog measured it; else when the end was recorded."""
    if last is None:
        return None
    if isinstance(last.facts.get("ended"), int | float):
        return float(last.facts["ended"])
    duration = last.facts.get("duration_s")
    measured = isinstance(duration, int | float) and launched is not None and launched.attempt == last.attempt
    return launched.time + duration if measured and launched is not None and duration is not None else last.time


def _last_change(life: list[RunEvent]) -> RunEvent | None:
    """What took it to its phase; notes and alarms that came later did not."""
    known = frozenset(PhaseEvent)
    return next((record for record in reversed(life) if record.happening in known), None)


def _last(life: list[RunEvent], happening: PhaseEvent) -> RunEvent | None:
    return next((record for record in reversed(life) if record.happening == happening), None)


def read_packed(note: Path) -> RunRecord | None:
    """The row of a run whose directory was packed, as it was written beside the package."""
    data = read_json(note)
    if data is None or not note.with_suffix(".tar.gz").exists():
        return None
    try:
        return replace(from_json(RunRecord, data), alarms=(), archived=True)
    except (KeyError, TypeError, ValueError):
        return None


def _checkpoint(note: Path) -> CheckpointRecord | None:
    data = read_json(note)
    try:
        if data is None:
            return None
        data.pop("schema", None)
        return CheckpointRecord(**data)
    except TypeError:
        return None
