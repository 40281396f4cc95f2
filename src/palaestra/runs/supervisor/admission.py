"""Making room for a run: its directory with what was asked for, and an attempt's with what will be executed.

Whatever appears under runs/ is complete: it is made under another name and renamed.
"""

from __future__ import annotations

import shutil
from typing import Any

from palaestra.errors import ConfigError, LaunchRefused
from palaestra.files.atomic import sync, write_json, write_text
from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.runs.phase import Phase
from palaestra.runs.record import MAX_INTEGER, RunRecord
from palaestra.runs.runner import AttemptPaths, LaunchPlan
from palaestra.runs.spec import RunSpec, find_text_fault, find_value_fault
from palaestra.runs.state.attempt_plan import AttemptPlan

__all__ = [
    "admit",
    "first_row",
    "free_disk",
    "named",
    "place_of",
    "plan_fault",
    "prepare_attempt",
    "read_spec",
]

_LONGEST_NAME = 300


def place_of(run: RunDirectory, number: int, resume_from: str | None = None) -> AttemptPaths:
    """Where an attempt will live."""
    attempt = run.attempt(number)
    return AttemptPaths(run.run_id, number, run.path, attempt.path, attempt.work, resume_from)


def plan_fault(plan: LaunchPlan) -> str:
    """Why what a runner planned cannot be put on record; empty when it can."""
    for name, text in (("environment", plan.env_id), ("algorithm", plan.algorithm)):
        fault = find_text_fault(text, _LONGEST_NAME)
        if fault:
            return f"its {name} {text!r} {fault}"
    if plan.total_steps is not None and not 0 <= plan.total_steps <= MAX_INTEGER:
        return f"{plan.total_steps} steps are not a number of steps that can be counted"
    fault = find_value_fault(dict(plan.resolved))
    return f"one of its values, {fault}" if fault else ""


def admit(home: Home, run_id: str, spec: RunSpec, plan: LaunchPlan) -> RunDirectory:
    """The directory of a new run, durable when this returns."""
    if _is_taken(home, run_id):
        raise LaunchRefused("run_id", run_id, "is another run's already", "Leave it out, or take that of a new preview")
    try:
        return RunDirectory.create(
            home.runs, run_id, spec.given or None, dict(plan.resolved), spec.model_dump(mode="json")
        )
    except (ConfigError, OSError, ValueError) as error:
        reason = error.reason if isinstance(error, ConfigError) else f"cannot be written ({error})"
        raise LaunchRefused("runs directory", str(home.runs), reason, "Free space, or set PALAESTRA_HOME") from None


def first_row(run_id: str, spec: RunSpec, plan: LaunchPlan, now: float) -> RunRecord:
    """The row of a run that was just admitted."""
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


def named(plan: LaunchPlan) -> dict[str, Any]:
    """What the plan calls things, for a run that waits and has no attempt yet."""
    return {"env_id": plan.env_id, "algorithm": plan.algorithm, "total_steps": plan.total_steps}


def prepare_attempt(attempt: Attempt, plan: LaunchPlan, gpus: tuple[str, ...]) -> None:
    """Everything an attempt needs before its warden starts. Harmless when repeated."""
    attempt.work.mkdir(parents=True, exist_ok=True)
    for name, text in plan.files.items():
        path = attempt.path / name
        if not path.resolve().is_relative_to(attempt.path.resolve()):
            raise ConfigError("plan.files", name, "leaves the attempt's directory", "Name it relative to the attempt")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    AttemptPlan.of(plan, gpus).write(attempt)
    write_json(attempt.command, plan.redacted(), mode=0o600)
    if attempt.number == 1:
        write_json(RunDirectory(attempt.path.parent).command, plan.redacted(), mode=0o600)
    sync(attempt.path)


def read_spec(run: RunDirectory) -> RunSpec:
    """What was asked for. `ConfigError` when it cannot be read."""
    try:
        return RunSpec.model_validate_json(run.spec.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError("spec", str(run.spec), f"cannot be read ({error})", "Start the run anew") from None


def free_disk(home: Home) -> int:
    """Bytes that are free where runs are kept, or will be."""
    path = home.path
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def _is_taken(home: Home, run_id: str) -> bool:
    """Whether a run has this id, wherever it was put."""
    archived = (home.archive / f"{run_id}.tar.gz").exists()
    return archived or home.run(run_id).path.exists() or any(home.trash.glob(f"{run_id}.*"))
