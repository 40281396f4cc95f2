"""Going on with a run that has ended: from which checkpoint, with which changes, and whether anything is left to do.

Everything is checked before the run changes: a checkpoint whose bytes are damaged is passed over or refused, and a
request without any work to do is refused with the command that gives it some. What was decided is written into the
life of the run, so that a service that is killed in between goes on with the same request.
"""

from __future__ import annotations

import copy
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palaestra.config import validated
from palaestra.errors import ConfigError, LaunchRefused
from palaestra.runs.admission import read_spec
from palaestra.runs.checkpoints.catalogue import checkpoints_of
from palaestra.runs.checkpoints.hashing import verify
from palaestra.runs.layout import RunPaths
from palaestra.runs.phase import Happening, Phase
from palaestra.runs.record import CheckpointRecord, LifeRecord, RunRecord
from palaestra.runs.runner import LaunchPlan
from palaestra.runs.spec import RunSpec

__all__ = [
    "ResumePoint",
    "ResumeRequest",
    "changed_columns",
    "changed_spec",
    "check_work_left",
    "find_resume_point",
    "outcome_before",
    "resumed_spec",
]


@dataclass(frozen=True)
class ResumeRequest:
    """What somebody wants to go on with."""

    checkpoint: str | None = None
    """Its id or a prefix of it, the name of its file, or its path; None is the newest that is whole."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Values by dotted key of the runner's configuration, such as `trainer.total_timesteps`."""

    @classmethod
    def pending(cls, life: Iterable[LifeRecord]) -> ResumeRequest:
        """The one that a life ends with."""
        facts = next((record.facts for record in reversed(list(life)) if record.happening == Happening.RESUMED), {})
        wanted = facts.get("checkpoint")
        return cls(wanted if isinstance(wanted, str) else None, _mapping(facts.get("changes")))

    def facts(self) -> dict[str, Any]:
        """What is written into the life of the run."""
        return {"checkpoint": self.checkpoint, "changes": dict(self.changes)}


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a resume begins with."""

    checkpoint: CheckpointRecord
    passed_over: tuple[str, ...] = ()
    """Newer ones that cannot be used, each with the reason."""

    @property
    def description(self) -> str:
        """`goes on from 07d57230162763d8 (step 4,096); passed over …`."""
        text = f"goes on from checkpoint {self.checkpoint.checkpoint_id} (step {self.checkpoint.shown_step})"
        return f"{text}; passed over {'; '.join(self.passed_over)}" if self.passed_over else text


def find_resume_point(
    run: RunPaths, record: RunRecord, rows: Sequence[CheckpointRecord], wanted: str | None
) -> ResumePoint:
    """The checkpoint that is wanted, or the newest that is whole. Reads every byte of it. `LaunchRefused` without one.

    `rows` are what the registry knows of the run; files that it does not know yet are found as well.
    """
    known = {row.path: row for row in rows if Path(row.path).exists()}
    lying = (row for attempt in run.attempts() for row in checkpoints_of(record, attempt, known))
    found = [*known.values(), *lying]
    found.sort(key=lambda row: (_is_checkpoint(row), row.attempt, row.created, row.path), reverse=True)
    if not found:
        raise LaunchRefused("run", run.run_id, "has no checkpoint to go on from", "Start it anew")
    if wanted is not None:
        return ResumePoint(_wanted(run.run_id, found, wanted))
    passed_over: list[str] = []
    for row in found:
        problem = _problem(row)
        if not problem:
            return ResumePoint(row, tuple(passed_over))
        passed_over.append(f"{row.checkpoint_id} (step {row.shown_step}): {problem}")
    reason = f"none of its {len(found)} checkpoints can be used ({passed_over[0]})"
    raise LaunchRefused("run", run.run_id, reason, "Start it anew")


def check_work_left(record: RunRecord, request: ResumeRequest, point: ResumePoint, plan: LaunchPlan) -> None:
    """`LaunchRefused` when a resume would end at once, or would be another run's work."""
    run_id = record.run_id
    if request.changes and plan.env_id != record.env_id:
        remedy = f"Start a new run with --warm-start {point.checkpoint.checkpoint_id}"
        raise LaunchRefused("env", plan.env_id, f"run {run_id} was trained in {record.env_id}", remedy)
    step, total = point.checkpoint.env_step, plan.total_steps
    done = step is not None and total is not None and step >= total
    succeeded, unchanged = record.phase is Phase.SUCCEEDED, request.checkpoint is None and not request.changes
    # A run that failed with all its steps taken may have failed at what comes after them, and goes on with that.
    if not (succeeded and unchanged) and not (done and (succeeded or request.changes)):
        return
    reached = f"checkpoint {point.checkpoint.checkpoint_id} has taken {step:,} of {total:,} steps" if done else ""
    reason = f"nothing is left to do: {reached or 'it has succeeded'}"
    raise LaunchRefused("run", run_id, reason, _more_to_do(run_id, plan))


def changed_columns(record: RunRecord, request: ResumeRequest, point: ResumePoint, plan: LaunchPlan) -> dict[str, Any]:
    """What a resume changes in the row of its run at once."""
    columns: dict[str, Any] = {"total_steps": plan.total_steps}
    step = point.checkpoint.env_step
    if step is not None and (request.checkpoint is not None or point.passed_over):
        # It goes back; what was counted beyond that step is counted again.
        kept = ("episodes", "episode_return", "tracking_url", "bytes_on_disk")
        columns |= {"env_step": step, **{name: getattr(record, name) for name in kept}}
    return columns


def resumed_spec(run: RunPaths, life: Iterable[LifeRecord]) -> RunSpec:
    """What was asked for, with the changes of every resume that began or waits. `ConfigError` if it cannot be read."""
    spec, waiting = read_spec(run), dict[str, Any]()
    for record in life:
        if record.happening == Happening.RESUMED:
            waiting = _mapping(record.facts.get("changes"))
        elif record.happening == Happening.RESUME_CANCELLED:
            waiting = {}
        elif record.happening == Happening.LAUNCHED:
            spec, waiting = changed_spec(spec, waiting), {}
    return changed_spec(spec, waiting)


def changed_spec(spec: RunSpec, changes: Mapping[str, Any]) -> RunSpec:
    """A request with other values in the runner's configuration. `ConfigError` for a key below something else."""
    if not changes:
        return spec
    config = copy.deepcopy(spec.config)
    for key, value in changes.items():
        *path, last = key.split(".")
        place = config
        for part in path:
            inner = place[part] = {} if place.get(part) is None else place[part]
            if not isinstance(inner, dict):
                raise ConfigError(key, value, f"{part!r} holds {inner!r}, which has no keys")
            place = inner
        if not last or not all(path):
            raise ConfigError("changes", key, "is not a key", "Write for example trainer.total_timesteps")
        place[last] = value
    return validated(RunSpec, {**spec.model_dump(), "config": config}, place="spec")


def outcome_before(life: Iterable[LifeRecord]) -> LifeRecord | None:
    """How the run had ended when it was last resumed; None for one that never was."""
    outcome: LifeRecord | None = None
    found: LifeRecord | None = None
    for record in life:
        if record.happening == Happening.RESUMED:
            found = outcome
        elif record.happening in frozenset(Happening) and record.phase.ended:
            outcome = record if record.happening != Happening.RESUME_CANCELLED else outcome
    return found


def _wanted(run_id: str, found: list[CheckpointRecord], name: str) -> CheckpointRecord:
    where = str(Path(name).resolve()) if "/" in name else name
    matches = {
        row.sha256: row
        for row in reversed(found)
        if row.checkpoint_id.startswith(name) or where == row.path or Path(row.path).name == name
    }
    if not matches:
        few = ", ".join(f"{row.checkpoint_id} (step {row.shown_step})" for row in found[:5])
        raise LaunchRefused("checkpoint", name, f"run {run_id} has no such checkpoint", f"It has {few}")
    if len(matches) > 1 and not any(Path(row.path).name == name for row in matches.values()):
        few = ", ".join(row.checkpoint_id for row in matches.values())
        raise LaunchRefused("checkpoint", name, f"several begin so ({few})", "Write more of the id")
    row = next(reversed(matches.values()))
    problem = _problem(row)
    if problem:
        good = next((other for other in found if other.sha256 != row.sha256 and not _problem(other)), None)
        other = f"palaestra runs resume {run_id} --checkpoint {good.checkpoint_id}" if good else "Start the run anew"
        raise LaunchRefused("checkpoint", row.checkpoint_id, problem, other)
    return row


def _is_checkpoint(row: CheckpointRecord) -> bool:
    """False for a file that merely lies among checkpoints, such as a normaliser or a replay buffer."""
    return row.format != "unknown" or row.step_source in ("announced", "name")


def _problem(row: CheckpointRecord) -> str:
    """Why a checkpoint cannot be gone on from; empty when its bytes are what was saved."""
    problem = verify(row).problem
    if problem or not zipfile.is_zipfile(row.path):
        return problem
    # A file that nobody announced is only compared with itself; its checksums tell whether it was written whole.
    try:
        with zipfile.ZipFile(row.path) as archive:
            torn = archive.testzip()
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        return f"cannot be read ({error})"
    return f"{torn} in it is damaged: its checksum differs" if torn else ""


def _more_to_do(run_id: str, plan: LaunchPlan) -> str:
    earlier = "go back with --checkpoint ID (palaestra checkpoints list)"
    value: Any = plan.resolved
    for part in plan.steps_key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if not plan.steps_key:
        return f"Raise the number of steps with KEY=VALUE, or {earlier}"
    more = f"{2 * value}" if isinstance(value, int) else "MORE"
    return f"Give it more: palaestra runs resume {run_id} {plan.steps_key}={more}, or {earlier}"


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}
