"""The directories of runs: created for a new run and a new attempt, and found again by the next service.

A directory under runs/ is always complete: it is created under another name and renamed. After a restart, the registry
is corrected where it is behind the directories.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Container
from dataclasses import dataclass, field, replace

from palaestra.errors import ConfigError, LaunchRefused
from palaestra.files.atomic import remove_stale_files, sync, write_json, write_text
from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.runs.phase import Phase
from palaestra.runs.process.attempt_process import find_unrecorded_attempt
from palaestra.runs.record import MAX_INTEGER, RunRecord, digest_config
from palaestra.runs.runner import AttemptPaths, LaunchPlan
from palaestra.runs.spec import RunSpec, find_text_fault, find_value_fault
from palaestra.runs.state.attempt_files import AttemptPlan
from palaestra.runs.state.event_log import RunEventLog, current_phase, read_edits
from palaestra.runs.state.unsupervised import may_have_changed, read_unsupervised
from palaestra.runs.store.rebuild import read_archived_run, read_config_digest, read_run
from palaestra.runs.store.registry import Registry
from palaestra.runs.wire import JsonObject, upgrade_names

_MAX_NAME_LENGTH = 300
_log = logging.getLogger(__name__)


def attempt_paths(run: RunDirectory, number: int, resume_from: str | None = None) -> AttemptPaths:
    """The paths of an attempt, given to the runner before the directory exists."""
    attempt = run.attempt(number)
    return AttemptPaths(run.run_id, number, run.path, attempt.path, attempt.work, resume_from)


def find_plan_fault(plan: LaunchPlan) -> str:
    """Why the plan of a runner cannot be stored; empty if it can."""
    for name, text in (("environment", plan.env_id), ("algorithm", plan.algorithm)):
        fault = find_text_fault(text, _MAX_NAME_LENGTH)
        if fault:
            return f"its {name} {text!r} {fault}"
    if plan.total_steps is not None and not 0 <= plan.total_steps <= MAX_INTEGER:
        return f"{plan.total_steps} is not a valid number of steps"
    fault = find_value_fault(dict(plan.resolved))
    return f"one of its values, {fault}" if fault else ""


def create_run(home: Home, run_id: str, spec: RunSpec, plan: LaunchPlan) -> RunDirectory:
    """Create the directory of a new run. It is durable when this returns."""
    archived = (home.archive / f"{run_id}.tar.gz").exists()
    if archived or home.run(run_id).path.exists() or any(home.trash.glob(f"{run_id}.*")):
        raise LaunchRefused("run_id", run_id, "is used by another run", "Omit it, or use the id of a new preview")
    try:
        return RunDirectory.create(
            home.runs, run_id, spec.config_text or None, dict(plan.resolved), spec.model_dump(mode="json")
        )
    except (ConfigError, OSError, ValueError) as error:
        reason = error.reason if isinstance(error, ConfigError) else f"cannot be written ({error})"
        raise LaunchRefused("runs directory", str(home.runs), reason, "Free space, or set PALAESTRA_HOME") from None


def initial_record(run_id: str, spec: RunSpec, plan: LaunchPlan, now: float) -> RunRecord:
    """The row of a new run."""
    return RunRecord(
        run_id=run_id,
        runner=spec.runner,
        agent_id=f"{spec.runner}/{plan.algorithm}" if plan.algorithm else spec.runner,
        env_id=plan.env_id or spec.env_id or "",
        phase=Phase.QUEUED,
        priority=spec.priority,
        created=now,
        total_steps=plan.total_steps,
        seed=spec.seed,
        tags=spec.tags,
        config_digest=digest_plan(spec, plan),
        host=spec.on or "",
    )


def digest_plan(spec: RunSpec, plan: LaunchPlan) -> str:
    """Hash of the configuration of a run that is about to be launched."""
    return digest_config(plan.env_id or spec.env_id or "", spec.model_dump(mode="json"), plan.resolved)


def plan_facts(spec: RunSpec, plan: LaunchPlan) -> JsonObject:
    """Facts of the plan for the event log of a queued run, which has no attempt yet."""
    facts: JsonObject = {"env_id": plan.env_id, "algorithm": plan.algorithm, "total_steps": plan.total_steps}
    facts |= {"host": spec.on} if spec.on else {}
    return {**facts, "config_digest": digest_plan(spec, plan)}


def prepare_attempt(attempt: Attempt, plan: LaunchPlan, gpus: tuple[str, ...]) -> None:
    """Write all files that an attempt needs before its watchdog starts. Idempotent."""
    attempt.work.mkdir(parents=True, exist_ok=True)
    for name, text in plan.files.items():
        path = attempt.path / name
        if not path.resolve().is_relative_to(attempt.path.resolve()):
            raise ConfigError("plan.files", name, "leaves the attempt's directory", "Name it relative to the attempt")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    AttemptPlan.of(plan, gpus).write(attempt)
    write_json(attempt.command, plan.to_redacted_dict(), mode=0o600)
    if attempt.number == 1:
        write_json(RunDirectory(attempt.path.parent).command, plan.to_redacted_dict(), mode=0o600)
    sync(attempt.path)


def read_spec(run: RunDirectory) -> RunSpec:
    """The stored spec of a run. `ConfigError` if it cannot be read."""
    try:
        document = json.loads(run.spec.read_bytes())
        return RunSpec.model_validate(upgrade_names(document) if isinstance(document, dict) else document)
    except (OSError, ValueError) as error:
        raise ConfigError("spec", str(run.spec), f"cannot be read ({error})", "Start a new run") from None


def free_disk_bytes(home: Home) -> int:
    """Free space on the disk of the state directory."""
    path = home.path
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


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
    if row is not None:
        # The service may have been killed between an edit and its row; an earlier version wrote no digest.
        digest = row.config_digest or read_config_digest(run, row.env_id, events)
        row = replace(row, **read_edits(events), config_digest=digest)
    # A damaged log may end with the previous attempt while the next one is running.
    is_live = not phase.has_ended or (log.corrupt_lines > 0 and find_unrecorded_attempt(run, events) is not None)
    return row, is_live


def update_unsupervised(home: Home, registry: Registry, supervised: Container[str]) -> None:
    """Bring the rows of runs that were started without the service up to date."""
    for path in home.runs.iterdir():
        if path.name.startswith(".") or path.name in supervised:
            continue
        row = registry.get(path.name)
        if row is not None and not may_have_changed(row, home.run(path.name)):
            continue
        try:
            current = read_unsupervised(home.run(path.name))
        except OSError:
            continue  # not a directory, or not readable
        if current is not None and current != row:
            registry.put(current)
