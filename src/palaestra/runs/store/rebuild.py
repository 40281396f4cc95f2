"""Rebuilds the registry from the run directories."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from palaestra.files.atomic import read_json
from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.processes.procfs import ProcessIdentity
from palaestra.redaction import Redactor
from palaestra.runs.phase import PhaseEvent, determine_outcome
from palaestra.runs.record import (
    Alarm,
    CheckpointRecord,
    RunEvent,
    RunRecord,
    digest_config,
    fit_checkpoint,
    fit_record,
)
from palaestra.runs.state.attempt_files import AttemptPlan, read_exit_facts, read_status
from palaestra.runs.state.event_log import RunEventLog, current_phase, read_edits
from palaestra.runs.state.unsupervised import read_unsupervised
from palaestra.runs.store.database import RegistryCorrupt, move_aside
from palaestra.runs.store.registry import ROW_ERRORS, Registry
from palaestra.runs.wire import JsonObject, from_json, upgrade_names
from palaestra.strict_json import optional_number

_log = logging.getLogger(__name__)
_IMPORTED = "*/record.json"


@dataclass(frozen=True)
class RebuildReport:
    """Result of a rebuild."""

    runs: int
    unreadable: tuple[str, ...] = ()
    """Directories under runs/ without a readable run."""


def open_registry(home: Home) -> Registry:
    """Open the registry for writing. A damaged or missing file is rebuilt from the run directories."""
    is_missing = not home.registry.exists()
    aside: Path | None = None
    try:
        registry = Registry.open(home.registry)
    except RegistryCorrupt as error:
        aside = move_aside(home.registry)
        _log.warning("the registry was damaged (%s); it was moved to %s and is being rebuilt", error, aside)
        registry = Registry.open(home.registry)
    if is_missing or aside is not None:
        report = rebuild(home, registry)
        if aside is not None:
            _log.warning("rebuilt the registry from %d run directories", report.runs)
    return registry


def rebuild_if_damaged(home: Home, registry: Registry) -> None:
    """Replace and rebuild an open registry whose file is damaged or gone. Does nothing when it is intact."""
    with registry.rebuild_lock:
        if registry.is_intact():
            return
        aside = registry.replace()
        report = rebuild(home, registry)
    cause = f"damaged; it was moved to {aside} and" if aside.exists() else "removed; it was"
    _log.warning("the registry was %s rebuilt from %d run directories", cause, report.runs)


def rebuild(home: Home, registry: Registry) -> RebuildReport:
    """Add every run and every imported checkpoint of the state directory to the registry."""
    records: dict[str, RunRecord] = {}
    unreadable: list[str] = []
    for path in sorted(home.runs.iterdir()) if home.runs.is_dir() else []:
        if path.name.startswith("."):
            continue
        record = read_run(RunDirectory(path))
        if record is None:
            unreadable.append(path.name)
        else:
            records[record.run_id] = record
    for note in sorted(home.archive.glob("*.json")):
        archived = read_archived_run(note)
        # A run with both a directory and an archive was interrupted while it was packed or restored; it is complete.
        if archived is not None:
            records.setdefault(archived.run_id, archived)
    registry.put_many(list(records.values()))
    for file in sorted(home.checkpoints.glob(_IMPORTED)):
        checkpoint = read_imported(file)
        try:
            if checkpoint is None:
                raise ValueError("its record cannot be read")
            registry.put_checkpoint(checkpoint)
        except ROW_ERRORS as error:
            _log.warning("%s: the row cannot be written: %s", file.parent, error)
    return RebuildReport(len(records), tuple(unreadable))


def read_run(run: RunDirectory) -> RunRecord | None:
    """Build the row of a run from its directory; None when it holds no readable run."""
    try:
        record = _read_run(run)
    except Exception as error:  # noqa: BLE001 - one unreadable directory must not hide the others
        _log.warning("%s: the directory cannot be read: %s: %s", run.run_id, type(error).__name__, error)
        return None
    return None if record is None else fit_record(record)


def _read_run(run: RunDirectory) -> RunRecord | None:
    spec = read_json(run.spec)
    if spec is None:
        if not run.spec.exists():
            return read_unsupervised(run)
        # The spec is damaged, but the events are still on record.
        spec = {}
    events = RunEventLog(run).read()
    last = _last_transition(events)
    attempts = run.attempts()
    if events:
        # An attempt that was prepared and never launched has no event, and its number is used again.
        attempts = [attempt for attempt in attempts if attempt.number <= events[-1].attempt]
    newest = attempts[-1] if attempts else None
    plan = AttemptPlan.read(newest) if newest else AttemptPlan()
    if plan == AttemptPlan():
        plan = _plan_before_launch(spec, events)
    launched = next((event for event in reversed(events) if event.kind == PhaseEvent.LAUNCHED), None)
    watchdog: ProcessIdentity | None = None
    trainer: ProcessIdentity | None = None
    phase, reason, code = current_phase(events), last.reason if last else "", last.code if last else ""
    ended = _end_time(launched, last) if phase.has_ended and last is not None else None
    if phase.has_process and newest is not None:
        status = read_status(newest)
        watchdog, trainer = status.watchdog, status.trainer
        if not status.alive and status.exit is not None:
            # No service recorded the end; the watchdog did.
            outcome = determine_outcome(read_exit_facts(newest, Redactor()))
            phase, reason, code = outcome.phase, outcome.reason, outcome.code
            ended = status.exit.ended
    runner = str(spec.get("runner", ""))
    numbers = next((event.facts for event in reversed(events) if "env_step" in event.facts), {})
    seed, priority, tags = spec.get("seed"), spec.get("priority"), spec.get("tags")
    edits = read_edits(events)
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
        created=events[0].time if events else run.spec.stat().st_mtime,
        started=launched.time if launched else None,
        ended=ended,
        watchdog=watchdog,
        trainer=trainer,
        env_step=numbers.get("env_step") or 0,
        total_steps=plan.total_steps,
        episodes=numbers.get("episodes") or 0,
        episode_return=optional_number(numbers.get("episode_return")),
        seed=seed if isinstance(seed, int) else None,
        tags=edits.get("tags", tuple(str(tag) for tag in tags) if isinstance(tags, list) else ()),
        alarms=_final_alarms(last) if phase.has_ended and last is not None else (),
        tracking_url=str(numbers.get("tracking_url") or ""),
        bytes_on_disk=numbers.get("bytes_on_disk") or 0,
        name=edits.get("name", ""),
        notes=edits.get("notes", ""),
        favorite=edits.get("favorite", False),
        config_digest=read_config_digest(run, plan.env_id, events),
        host=next((str(event.facts["host"]) for event in reversed(events) if "host" in event.facts), ""),
        code_version=_read_source_field(newest, "code", "version"),
        environment_digest=_read_source_field(newest, "environment", "digest"),
    )


def _read_source_field(attempt: Attempt | None, document: str, name: str) -> str:
    stored = None if attempt is None else read_json(attempt.source / f"{document}.json")
    return str((stored or {}).get(name) or "")


def read_config_digest(run: RunDirectory, env_id: str, events: list[RunEvent]) -> str:
    """The hash of a run's configuration as of its last launch; computed for a run of an earlier version."""
    known = next((event.facts["config_digest"] for event in reversed(events) if "config_digest" in event.facts), None)
    if isinstance(known, str):
        return known
    spec, resolved = read_json(run.spec), read_json(run.resolved)
    return "" if spec is None or resolved is None else digest_config(env_id, upgrade_names(spec), resolved)


def _final_alarms(end: RunEvent) -> tuple[Alarm, ...]:
    alarms = end.facts.get("alarms")
    return tuple(
        Alarm(str(alarm["code"]), str(alarm["text"]), float(alarm["since"]))
        for alarm in (alarms if isinstance(alarms, list) else ())
        if isinstance(alarm, dict) and {"code", "text", "since"} <= alarm.keys()
    )


def _plan_before_launch(spec: JsonObject, events: list[RunEvent]) -> AttemptPlan:
    facts = next((event.facts for event in events if "algorithm" in event.facts), {})
    steps = facts.get("total_steps")
    return AttemptPlan(
        env_id=str(facts.get("env_id") or spec.get("env_id") or ""),
        algorithm=str(facts.get("algorithm") or ""),
        total_steps=steps if isinstance(steps, int) else None,
    )


def _end_time(launched: RunEvent | None, last: RunEvent) -> float:
    """Return the end of the trainer as it was measured; otherwise the time at which the end was recorded."""
    ended, duration = last.facts.get("ended"), last.facts.get("duration_s")
    if isinstance(ended, int | float):
        return float(ended)
    if isinstance(duration, int | float) and launched is not None and launched.attempt == last.attempt:
        return launched.time + duration
    return last.time


def _last_transition(events: list[RunEvent]) -> RunEvent | None:
    """Return the event that led to the current phase; later notes and alarms do not count."""
    transitions = frozenset(PhaseEvent)
    return next((event for event in reversed(events) if event.kind in transitions), None)


def read_archived_run(note: Path) -> RunRecord | None:
    """Read the row stored beside the archive of a packed run; None when it cannot be read."""
    data = read_json(note)
    if data is None or not note.with_suffix(".tar.gz").exists():
        return None
    try:
        return replace(from_json(RunRecord, data), alarms=(), archived=True)
    except (KeyError, TypeError, ValueError):
        return None


def list_imported(home: Home) -> list[CheckpointRecord]:
    """Read the records of all imported and kept checkpoints."""
    files = sorted(home.checkpoints.glob(_IMPORTED))
    return [record for file in files if (record := read_imported(file)) is not None]


def read_imported(file: Path) -> CheckpointRecord | None:
    """Read the record beside an imported or kept checkpoint; None when it cannot be read."""
    data = read_json(file)
    if data is None or data.pop("schema", 1) != 1:
        return None
    try:
        return fit_checkpoint(CheckpointRecord(**data))
    except (TypeError, ValueError):
        return None
