"""The retention policy and the actions it plans. Pure: `RunArchive` executes the actions."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from palaestra.config import Section
from palaestra.runs.record import CheckpointRecord, RunRecord
from palaestra.runs.wire import API_SCHEMA

_DAY_S = 86_400.0
_GB = 1 << 30


class RetentionPolicy(Section):
    """How long runs are kept. By default everything is kept.

    Runs that have not ended and favorites are always kept, with all of their files.
    """

    every_h: float | None = Field(default=None, ge=0.1, le=8760)
    """Apply the policy automatically, every this many hours (at least 0.1) while a service runs; null: only by
    `runs gc --yes`. `palaestra runs gc` shows what was done."""
    archive_after_days: float | None = Field(default=None, ge=0)
    """Archive a run this many days after it ended; it can be restored."""
    delete_archived_after_days: float | None = Field(default=None, ge=0)
    """Delete an archived run this many days after it ended."""
    keep_last: int | None = Field(default=None, ge=0)
    """Archive all runs that have ended, except the newest N."""
    max_total_gb: float | None = Field(default=None, gt=0)
    """Archive the oldest runs until the others take no more than this."""
    undo_days: float = Field(default=7.0, ge=0)
    """Number of days for which a deleted run can be restored."""
    keep_checkpoints: int | None = Field(default=None, ge=1)
    """Permanently remove the checkpoints of an ended run, except the newest N and the best."""
    keep_clips: int | None = Field(default=None, ge=0)
    """Permanently remove the clips of an ended run, except the newest N."""
    log_mb: int = Field(default=100, ge=11)
    """Remove the middle of an ended run's output that is longer than this."""


@dataclass(frozen=True)
class RetentionAction:
    """One action of the retention policy on a run."""

    __pydantic_config__ = API_SCHEMA

    run_id: str
    action: Literal["archive", "delete", "prune", "clips", "shorten", "purge"]
    """`prune` removes checkpoints, `clips` clips, `shorten` the middle of outputs, `purge` a run in the trash."""
    why: str
    bytes: int
    paths: tuple[str, ...] = ()
    """Files and directories that are permanently removed."""
    failed: str = ""
    """Why the action failed; empty when it succeeded or was not executed."""


def plan_retention(
    runs: Sequence[RunRecord], policy: RetentionPolicy, now: float, protected: Collection[str] = ()
) -> list[RetentionAction]:
    """Runs to archive or delete, oldest first, each for the first reason that applies. Protected runs are kept."""
    ended = sorted((run for run in runs if run.phase.has_ended and run.supervised), key=_end_time)
    actions: dict[str, RetentionAction] = {}
    limit = policy.delete_archived_after_days
    for run in ended:
        age = (now - _end_time(run)) / _DAY_S
        if run.archived and limit is not None and age >= limit:
            why = f"ended {age:.0f} days ago; archives are kept {limit:g}"
            actions[run.run_id] = RetentionAction(run.run_id, "delete", why, run.bytes_on_disk)
    unpacked = [run for run in ended if not run.archived]
    for run, why in _runs_to_archive(unpacked, policy, now, protected):
        actions.setdefault(run.run_id, RetentionAction(run.run_id, "archive", why, run.bytes_on_disk))
    return [actions[run.run_id] for run in ended if run.run_id in actions and run.run_id not in protected]


def plan_checkpoint_pruning(
    runs: Sequence[RunRecord], checkpoints: Sequence[CheckpointRecord], keep: int, protected: Collection[str] = ()
) -> list[RetentionAction]:
    """Checkpoints of ended runs to remove: all but the newest `keep`, the best and the protected paths."""
    ended = {run.run_id for run in runs if run.phase.has_ended and run.supervised}
    by_run: dict[str, list[CheckpointRecord]] = {}
    for checkpoint in sorted(checkpoints, key=_checkpoint_age, reverse=True):
        if checkpoint.run_id in ended:
            by_run.setdefault(checkpoint.run_id, []).append(checkpoint)
    actions = []
    for run_id, newest_first in sorted(by_run.items()):
        surplus = [one for one in newest_first[keep:] if not one.best and one.path not in protected]
        if surplus:
            why = f"{len(surplus)} checkpoints beyond the newest {keep} and the best"
            size = sum(one.size_bytes for one in surplus)
            actions.append(RetentionAction(run_id, "prune", why, size, tuple(one.path for one in surplus)))
    return actions


def _checkpoint_age(checkpoint: CheckpointRecord) -> tuple[int, float, float]:
    """Sort key; a checkpoint of unknown step counts as new, so that it is kept."""
    return checkpoint.attempt, math.inf if checkpoint.env_step is None else checkpoint.env_step, checkpoint.created


def _runs_to_archive(
    unpacked: list[RunRecord], policy: RetentionPolicy, now: float, protected: Collection[str]
) -> list[tuple[RunRecord, str]]:
    """Runs and reasons; a run may occur several times."""
    chosen: list[tuple[RunRecord, str]] = []
    if policy.archive_after_days is not None:
        limit = policy.archive_after_days
        for run in unpacked:
            age = (now - _end_time(run)) / _DAY_S
            if age >= limit:
                chosen.append((run, f"ended {age:.0f} days ago; runs are kept open {limit:g}"))
    if policy.keep_last is not None:
        surplus = unpacked[: max(0, len(unpacked) - policy.keep_last)]
        chosen += [(run, f"not among the newest {policy.keep_last}") for run in surplus]
    if policy.max_total_gb is not None:
        leaving = {run.run_id for run, _ in chosen if run.run_id not in protected}
        remaining_bytes = sum(run.bytes_on_disk for run in unpacked if run.run_id not in leaving)
        for run in unpacked:
            if remaining_bytes <= policy.max_total_gb * _GB:
                break
            if run.run_id not in leaving and run.run_id not in protected:
                chosen.append((run, f"open runs take more than {policy.max_total_gb:g} GB"))
                remaining_bytes -= run.bytes_on_disk
    return chosen


def _end_time(run: RunRecord) -> float:
    return run.ended if run.ended is not None else run.created
