"""What may go: decided from the rows of the registry and a policy, shown before anything is touched. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from palaestra.config import Section
from palaestra.runs.record import CheckpointRecord, RunRecord
from palaestra.runs.wire import API_SCHEMA

__all__ = ["RetentionAction", "RetentionPolicy", "plan_retention", "surplus_checkpoints"]

_DAY_S = 86_400.0
_GB = 1 << 30


class RetentionPolicy(Section):
    """How long runs are kept. Nothing goes by default, and a run that is not over never does."""

    archive_after_days: float | None = Field(default=None, ge=0)
    """Pack a run this long after it ended; it can be restored."""
    delete_archived_after_days: float | None = Field(default=None, ge=0)
    """Throw a packed run away this long after it ended."""
    keep_last: int | None = Field(default=None, ge=0)
    """Of all runs that have ended, pack all but the newest so many."""
    max_total_gb: float | None = Field(default=None, gt=0)
    """Pack the oldest until the unpacked ones take no more than this."""
    undo_days: float = Field(default=7.0, ge=0)
    """How long what was thrown away can be brought back."""
    keep_checkpoints: int | None = Field(default=None, ge=1)
    """Of a run that has ended, remove for good all checkpoints but the newest so many and the best."""
    keep_clips: int | None = Field(default=None, ge=0)
    """Of a run that has ended, remove for good all clips but the newest so many."""
    log_mb: int = Field(default=100, ge=11)
    """Of a longer output of a run that has ended, the middle goes."""


@dataclass(frozen=True)
class RetentionAction:
    """One action of the retention policy on a run."""

    __pydantic_config__ = API_SCHEMA

    run_id: str
    action: Literal["archive", "delete", "prune", "clips", "shorten", "purge"]
    """`prune` removes checkpoints, `clips` clips, `shorten` the middle of outputs, `purge` what lies in the trash."""
    why: str
    bytes: int
    paths: tuple[str, ...] = ()
    """What is removed for good."""
    failed: str = ""
    """Why it could not be done; empty when it was, or nobody has tried."""


def plan_retention(
    runs: Sequence[RunRecord], policy: RetentionPolicy, now: float, spared: Collection[str] = ()
) -> list[RetentionAction]:
    """Which runs go, oldest first, each for the first reason that applies; the spared ones count and stay."""
    over = sorted((run for run in runs if run.phase.has_ended and run.supervised), key=_ended)
    packed, open_ = [run for run in over if run.archived], [run for run in over if not run.archived]
    found: dict[str, RetentionAction] = {}
    for run in packed:
        age = (now - _ended(run)) / _DAY_S
        limit = policy.delete_archived_after_days
        if limit is not None and age >= limit:
            why = f"ended {age:.0f} days ago; archives are kept {limit:g}"
            found[run.run_id] = RetentionAction(run.run_id, "delete", why, run.bytes_on_disk)
    for run, why in _to_archive(open_, policy, now, spared):
        found.setdefault(run.run_id, RetentionAction(run.run_id, "archive", why, run.bytes_on_disk))
    return [found[run.run_id] for run in over if run.run_id in found and run.run_id not in spared]


def surplus_checkpoints(
    runs: Sequence[RunRecord], checkpoints: Sequence[CheckpointRecord], keep: int, spared: Collection[str] = ()
) -> list[RetentionAction]:
    """Of every run that has ended, the checkpoints beyond the newest `keep`; its best and the spared paths stay."""
    over = {run.run_id for run in runs if run.phase.has_ended and run.supervised}
    mine: dict[str, list[CheckpointRecord]] = {}
    for row in sorted(checkpoints, key=_newness, reverse=True):
        if row.run_id in over:
            mine.setdefault(row.run_id, []).append(row)
    found = []
    for run_id, rows in sorted(mine.items()):
        surplus = [row for row in rows[keep:] if not row.best and row.path not in spared]
        if surplus:
            why = f"{len(surplus)} checkpoints beyond the newest {keep} and the best"
            size = sum(row.size_bytes for row in surplus)
            found.append(RetentionAction(run_id, "prune", why, size, tuple(row.path for row in surplus)))
    return found


def _newness(row: CheckpointRecord) -> tuple[int, float, float]:
    """What checkpoints of a run are sorted by; one whose step is unknown is rather kept."""
    return row.attempt, math.inf if row.env_step is None else row.env_step, row.created


def _to_archive(
    open_: list[RunRecord], policy: RetentionPolicy, now: float, spared: Collection[str]
) -> list[tuple[RunRecord, str]]:
    chosen: list[tuple[RunRecord, str]] = []
    if policy.archive_after_days is not None:
        limit = policy.archive_after_days
        for run in open_:
            age = (now - _ended(run)) / _DAY_S
            if age >= limit:
                chosen.append((run, f"ended {age:.0f} days ago; runs are kept open {limit:g}"))
    if policy.keep_last is not None:
        surplus = open_[: max(0, len(open_) - policy.keep_last)]
        chosen += [(run, f"not among the newest {policy.keep_last}") for run in surplus]
    if policy.max_total_gb is not None:
        going = {run.run_id for run, _ in chosen if run.run_id not in spared}
        left = sum(run.bytes_on_disk for run in open_ if run.run_id not in going)
        for run in open_:
            if left <= policy.max_total_gb * _GB:
                break
            if run.run_id not in going and run.run_id not in spared:
                chosen.append((run, f"open runs take more than {policy.max_total_gb:g} GB"))
                left -= run.bytes_on_disk
    return chosen


def _ended(run: RunRecord) -> float:
    return run.ended if run.ended is not None else run.created
