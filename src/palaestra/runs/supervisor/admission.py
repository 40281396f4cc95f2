"""Creates the directory of a run with its spec, and the directory of an attempt with its plan.

A directory under runs/ is always complete: it is created under another name and renamed.
"""

from __future__ import annotations

import json
import shutil

from palaestra.errors import ConfigError, LaunchRefused
from palaestra.files.atomic import sync, write_json, write_text
from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.runs.phase import Phase
from palaestra.runs.record import MAX_INTEGER, RunRecord
from palaestra.runs.runner import AttemptPaths, LaunchPlan
from palaestra.runs.spec import RunSpec, find_text_fault, find_value_fault
from palaestra.runs.state.attempt_plan import AttemptPlan
from palaestra.runs.wire import JsonObject, upgrade_names

_MAX_NAME_LENGTH = 300


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
    )


def plan_facts(plan: LaunchPlan) -> JsonObject:
    """Facts of the plan for the event log of a queued run, which has no attempt yet."""
    return {"env_id": plan.env_id, "algorithm": plan.algorithm, "total_steps": plan.total_steps}


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
