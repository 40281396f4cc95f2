"""Resuming a run that has ended: from which checkpoint, with which changes, and whether any work is left.

Everything is checked before the run changes. A checkpoint with damaged bytes is skipped or refused, and a request that
leaves no work to do is refused with a command that adds some. The decision is written to the event log of the run, so
a service that is killed in between continues with the same request.
"""

from __future__ import annotations

import copy
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from palaestra.config import parse_section
from palaestra.config.file import set_value
from palaestra.errors import ConfigError, LaunchRefused
from palaestra.files.home import Home
from palaestra.files.run_directory import RunDirectory
from palaestra.runs.checkpoints.catalogue import find_checkpoints
from palaestra.runs.checkpoints.files import verify
from palaestra.runs.phase import Phase, PhaseEvent
from palaestra.runs.record import CheckpointRecord, RunChanges, RunEvent, RunRecord
from palaestra.runs.runner import LaunchPlan
from palaestra.runs.spec import RunSpec
from palaestra.runs.store.registry import Registry
from palaestra.runs.supervisor.run_files import read_spec
from palaestra.runs.wire import JsonObject


@dataclass(frozen=True)
class ResumeRequest:
    """The arguments of a resume."""

    checkpoint: str | None = None
    """Id of the checkpoint, a prefix of the id, its file name or its path; None: the newest undamaged one."""
    changes: Mapping[str, object] = field(default_factory=dict)
    """Values by dotted key of the runner's configuration, such as `trainer.total_timesteps`."""
    on: str | None = None
    """Where to resume it; None: where it ran last. Empty: on the machine of the service."""

    @classmethod
    def pending(cls, events: Iterable[RunEvent]) -> ResumeRequest:
        """The last request in the event log of a run."""
        facts = next((event.facts for event in reversed(list(events)) if event.kind == PhaseEvent.RESUMED), {})
        wanted = facts.get("checkpoint")
        return cls(wanted if isinstance(wanted, str) else None, _mapping(facts.get("changes")))

    def facts(self) -> JsonObject:
        """The request as stored in the event log."""
        facts: JsonObject = {"checkpoint": self.checkpoint, "changes": dict(self.changes)}
        return facts if self.on is None else {**facts, "on": self.on}


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a resume continues from."""

    checkpoint: CheckpointRecord | None
    """None if the command is executed again, because only the program knows its checkpoints."""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that cannot be used, each with the reason."""

    @property
    def description(self) -> str:
        """`resumes from checkpoint 07d57230162763d8 (step 4,096); skipped …`."""
        if self.checkpoint is None:
            return "executes the command again"
        text = f"resumes from checkpoint {self.checkpoint.checkpoint_id} (step {self.checkpoint.step_text})"
        return f"{text}; skipped {'; '.join(self.skipped)}" if self.skipped else text

    @property
    def path(self) -> str | None:
        """The path of the checkpoint, if any."""
        return None if self.checkpoint is None else self.checkpoint.path


def find_restart_point(record: RunRecord, wanted: str | None) -> ResumePoint:
    """The point from which a program is executed again. `LaunchRefused` for a checkpoint, and after a success."""
    again = f"palaestra runs start --like {record.run_id} [KEY=VALUE]"
    if wanted is not None:
        reason = "the checkpoints of a program are its own"
        raise LaunchRefused("checkpoint", wanted, reason, f"Leave --checkpoint out, or start a new run: {again}")
    if record.phase is Phase.SUCCEEDED:
        reason = "no work is left: it has succeeded"
        raise LaunchRefused("run", record.run_id, reason, f"Start it as a new run: {again}")
    return ResumePoint(None)


def find_resume_point(home: Home, registry: Registry, record: RunRecord, wanted: str | None) -> ResumePoint:
    """The wanted checkpoint, or the newest undamaged one; every byte of it is read. `LaunchRefused` without one.

    Files that are not in the registry yet are considered as well.
    """
    run = home.run(record.run_id)
    known = {row.path: row for row in registry.checkpoints(run_id=record.run_id) if Path(row.path).exists()}
    unregistered = (row for attempt in run.attempts() for row in find_checkpoints(record, attempt, known))
    checkpoints = [*known.values(), *unregistered]
    checkpoints.sort(key=lambda row: (_is_checkpoint(row), row.attempt, row.created, row.path), reverse=True)
    if not checkpoints:
        raise LaunchRefused("run", run.run_id, "has no checkpoint to resume from", "Start a new run")
    if wanted is not None:
        return ResumePoint(_find_checkpoint(run.run_id, checkpoints, wanted))
    skipped: list[str] = []
    for row in checkpoints:
        problem = _problem(row)
        if not problem:
            return ResumePoint(row, tuple(skipped))
        skipped.append(f"{row.checkpoint_id} (step {row.step_text}): {problem}")
    reason = f"none of its {len(checkpoints)} checkpoints can be used ({skipped[0]})"
    raise LaunchRefused("run", run.run_id, reason, "Start a new run")


def check_work_left(record: RunRecord, request: ResumeRequest, point: ResumePoint, plan: LaunchPlan) -> None:
    """Raise `LaunchRefused` when a resume would end at once, or would train in another environment."""
    run_id = record.run_id
    if point.checkpoint is None:
        return
    if request.changes and plan.env_id != record.env_id:
        remedy = f"Start a new run with --warm-start {point.checkpoint.checkpoint_id}"
        raise LaunchRefused("env", plan.env_id, f"run {run_id} was trained in {record.env_id}", remedy)
    step, total = point.checkpoint.env_step, plan.total_steps
    done = step is not None and total is not None and step >= total
    succeeded, unchanged = record.phase is Phase.SUCCEEDED, request.checkpoint is None and not request.changes
    # A run that failed after its last step may still have work to do, such as saving.
    if not (succeeded and unchanged) and not (done and (succeeded or request.changes)):
        return
    reached = f"checkpoint {point.checkpoint.checkpoint_id} has taken {step:,} of {total:,} steps" if done else ""
    reason = f"no work is left: {reached or 'it has succeeded'}"
    raise LaunchRefused("run", run_id, reason, _how_to_train_further(run_id, plan, step))


def resume_columns(record: RunRecord, request: ResumeRequest, point: ResumePoint, plan: LaunchPlan) -> RunChanges:
    """Columns of the run's row that a resume changes immediately."""
    step = None if point.checkpoint is None else point.checkpoint.env_step
    if step is None or (request.checkpoint is None and not point.skipped):
        return {"total_steps": plan.total_steps}
    # The run goes back to that step and counts later steps again.
    return {
        "total_steps": plan.total_steps,
        "env_step": step,
        "episodes": record.episodes,
        "episode_return": record.episode_return,
        "tracking_url": record.tracking_url,
        "bytes_on_disk": record.bytes_on_disk,
    }


def read_current_spec(run: RunDirectory, events: Iterable[RunEvent]) -> RunSpec:
    """The spec of a run with the changes of all launched or pending resumes. `ConfigError` if it cannot be read."""
    spec, pending, on = read_spec(run), JsonObject(), None
    for event in events:
        if event.kind == PhaseEvent.RESUMED:
            pending, on = _mapping(event.facts.get("changes")), event.facts.get("on")
        elif event.kind == PhaseEvent.RESUME_CANCELLED:
            pending, on = {}, None
        elif event.kind == PhaseEvent.LAUNCHED:
            # Later attempts go where this one went.
            spec, pending, on = change_spec(spec, pending, str(event.facts.get("host") or "")), {}, None
    return change_spec(spec, pending, on if isinstance(on, str) else None)


def change_spec(spec: RunSpec, changes: Mapping[str, object], on: str | None = None) -> RunSpec:
    """A spec with other values in the runner's configuration, and for another machine if one is given.

    `ConfigError` for a key inside a plain value.
    """
    if on is not None and (on or None) != spec.on:
        spec = spec.model_copy(update={"on": on or None})
    if not changes:
        return spec
    config = copy.deepcopy(spec.config)
    for key, value in changes.items():
        if not all(key.split(".")):
            raise ConfigError("changes", key, "is not a key", "Write for example trainer.total_timesteps")
        set_value(config, key, value)
    return parse_section(RunSpec, {**spec.model_dump(), "config": config}, place="spec")


def _find_checkpoint(run_id: str, checkpoints: list[CheckpointRecord], name: str) -> CheckpointRecord:
    path = str(Path(name).resolve()) if "/" in name else name
    matches = {
        row.sha256: row
        for row in reversed(checkpoints)
        if row.checkpoint_id.startswith(name) or path == row.path or Path(row.path).name == name
    }
    if not matches:
        few = ", ".join(f"{row.checkpoint_id} (step {row.step_text})" for row in checkpoints[:5])
        raise LaunchRefused("checkpoint", name, f"run {run_id} has no such checkpoint", f"It has {few}")
    if len(matches) > 1 and not any(Path(row.path).name == name for row in matches.values()):
        few = ", ".join(row.checkpoint_id for row in matches.values())
        raise LaunchRefused("checkpoint", name, f"matches several checkpoints ({few})", "Give more digits of the id")
    row = next(reversed(matches.values()))
    problem = _problem(row)
    if problem:
        good = next((other for other in checkpoints if other.sha256 != row.sha256 and not _problem(other)), None)
        other = f"palaestra runs resume {run_id} --checkpoint {good.checkpoint_id}" if good else "Start a new run"
        raise LaunchRefused("checkpoint", row.checkpoint_id, problem, other)
    return row


def _is_checkpoint(row: CheckpointRecord) -> bool:
    """False for other files beside the checkpoints, such as a normaliser or a replay buffer."""
    return row.format != "unknown" or row.step_source in ("announced", "name")


def _problem(row: CheckpointRecord) -> str:
    """Why a run cannot continue from a checkpoint; empty when its bytes are as they were saved."""
    problem = verify(row).problem
    if problem or not zipfile.is_zipfile(row.path):
        return problem
    # The hash of a file that its trainer did not announce was computed later; the zip's own checksums show damage.
    try:
        with zipfile.ZipFile(row.path) as archive:
            torn = archive.testzip()
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        return f"cannot be read ({error})"
    return f"{torn} in it is damaged: its checksum differs" if torn else ""


def _how_to_train_further(run_id: str, plan: LaunchPlan, step: int | None) -> str:
    earlier = "go back with --checkpoint ID (palaestra checkpoints list)"
    value: object = plan.resolved
    for part in plan.steps_key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if not plan.steps_key:
        return f"Raise the number of steps with KEY=VALUE, or {earlier}"
    more = "MORE"
    if isinstance(value, int) and value and plan.total_steps:
        # The key may count updates of many steps each.
        more = f"{2 * max(value, (step or 0) * value // plan.total_steps)}"
    return f"Give it more: palaestra runs resume {run_id} {plan.steps_key}={more}, or {earlier}"


def _mapping(value: object) -> JsonObject:
    return dict(value) if isinstance(value, dict) else {}
