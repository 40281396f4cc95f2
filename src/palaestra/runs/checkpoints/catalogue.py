"""Which checkpoints there are: those that trainers announce, and those that merely lie where they should.

Rows of the registry are an index: everything in them can be read again from the files. A checkpoint that lies outside
of its run is not ours to list, and a row whose file the trainer has removed goes.
"""

from __future__ import annotations

import time
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from palaestra.files.atomic import read_json
from palaestra.files.checkpoint import MANIFEST
from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.runs.checkpoints.hashing import digest_path
from palaestra.runs.checkpoints.own_checkpoint import OwnCheckpoint
from palaestra.runs.checkpoints.pickle_scan import SB3_WEIGHTS
from palaestra.runs.checkpoints.signature import signature_of
from palaestra.runs.checkpoints.steps import AttemptSteps
from palaestra.runs.record import CheckpointRecord, RunRecord
from palaestra.runs.state.attempt_plan import AttemptPlan
from palaestra.runs.store.registry import Registry
from palaestra.telemetry.event import CheckpointSaved, Record

__all__ = ["CheckpointCatalogue", "CheckpointIndex", "attempts_with_checkpoints", "checkpoints_of", "format_of"]

_MAX_FILES = 10_000
_RETURNS = "episode/return"


class CheckpointIndex(Protocol):
    """Who keeps the rows of checkpoints. Called from threads, and more than once about the same ones."""

    def seen(self, run: RunRecord, attempt: Attempt, records: Sequence[Record]) -> None:
        """Checkpoints that a trainer announced."""

    def scan(self, run: RunRecord, attempt: Attempt, patterns: Sequence[str]) -> None:
        """An attempt has ended; whatever matches the patterns in its working directory is a checkpoint."""

    def catch_up(self, home: Home, enough: Callable[[], bool] = ...) -> int:
        """The registry was made anew; put everything in that the directories hold."""

    def recall(self, home: Home, run: RunRecord) -> None:
        """A run was put away or brought back; its rows follow what lies there now."""


class CheckpointCatalogue:
    """Keeps the rows of checkpoints true. Threads may share it; saying the same thing twice changes nothing."""

    def __init__(self, registry: Registry, clock: Callable[[], float] = time.time) -> None:
        self._registry, self._clock = registry, clock

    def seen(self, run: RunRecord, attempt: Attempt, records: Sequence[Record]) -> None:
        """Checkpoints that a trainer announced."""
        steps = AttemptSteps(attempt)
        for _, when, event in records:
            if isinstance(event, CheckpointSaved):
                path = _below(attempt, event.path)
                found = None if path is None else _read(run, attempt, path, steps)
                if found is not None:
                    self._put(self._as_announced(found, event, when))
        self._forget_missing(run.run_id)

    def scan(self, run: RunRecord, attempt: Attempt, patterns: Sequence[str]) -> None:
        """An attempt has ended: what lies there and was not announced is a checkpoint, too."""
        known = {row.path: row for row in self._registry.checkpoints(run_id=run.run_id)}
        steps = AttemptSteps(attempt)
        added = []
        for path in _lying(attempt, patterns):
            row = known.get(str(path))
            if row is None:
                found = _read(run, attempt, path, steps)
                if found is not None:
                    announced = steps.announcement(path)
                    added.append(found if announced is None else self._as_announced(found, announced[1], announced[0]))
            elif row.attempt == attempt.number:
                # The numbers of the moment may not have been written when it was announced; now they are.
                changed = _with_numbers(row, attempt, steps)
                if changed != row:
                    self._registry.put_checkpoint(changed)
        for found in sorted(added, key=lambda row: row.created):
            self._put(found)
        self._forget_missing(run.run_id)

    def catch_up(self, home: Home, enough: Callable[[], bool] = lambda: False) -> int:
        """Add what runs without any row have, such as after a registry was lost; how many were added."""
        rows = self._registry.checkpoints()
        listed = {row.run_id for row in rows}
        # An earlier version took the step of the run for that of the file, and did not say so.
        doubtful = {row.run_id for row in rows if row.run_id and not row.step_source}
        added = 0
        for run in self._registry.runs():
            if enough():
                break
            settled = run.run_id in listed and run.run_id not in doubtful
            attempts = [] if settled else attempts_with_checkpoints(home.run(run.run_id))
            for attempt in attempts:
                self.scan(run, attempt, _patterns(attempt))
            added += len(self._registry.checkpoints(run_id=run.run_id)) if attempts and run.run_id not in listed else 0
        return added

    def recall(self, home: Home, run: RunRecord) -> None:
        """A run was packed, brought back or thrown away: its rows follow what lies there now."""
        self._forget_missing(run.run_id)
        for attempt in attempts_with_checkpoints(home.run(run.run_id)):
            self.scan(run, attempt, _patterns(attempt))

    def _as_announced(self, found: CheckpointRecord, event: CheckpointSaved, when: float) -> CheckpointRecord:
        told = event.sha256 or found.sha256
        return replace(
            found,
            checkpoint_id=told[:16],
            sha256=told,
            env_step=event.env_step,
            step_source="announced",
            created=when,
            best=event.best,
            metric=event.metric if event.metric is not None else found.metric,
            # What the trainer says it wrote is the truth; bytes that differ by now are damaged.
            verified=None if told == found.sha256 else -self._clock(),
        )

    def _put(self, record: CheckpointRecord) -> None:
        mine = self._registry.checkpoints(run_id=record.run_id)
        there = next((row for row in mine if row.path == record.path), None)
        if there is not None and there.sha256 == record.sha256:
            record = replace(record, verified=there.verified, best=record.best or there.best)
        self._registry.put_checkpoint(record)
        if record.best:
            for row in mine:
                if row.best and row.path != record.path and row.created <= record.created:
                    self._registry.put_checkpoint(replace(row, best=False))

    def _forget_missing(self, run_id: str) -> None:
        for row in self._registry.checkpoints(run_id=run_id):
            if not Path(row.path).exists():
                self._registry.delete_checkpoint(row.path)


def attempts_with_checkpoints(run: RunDirectory) -> list[Attempt]:
    """Those in which something lies that may be one; cheap, since there are thousands of runs without any."""
    return [attempt for attempt in run.attempts() if next(_lying(attempt, _patterns(attempt)), None) is not None]


def checkpoints_of(run: RunRecord, attempt: Attempt, known: Collection[str] = ()) -> list[CheckpointRecord]:
    """What lies there, read from the files alone, oldest first; known paths are left out."""
    steps = AttemptSteps(attempt)
    paths = [path for path in _lying(attempt, _patterns(attempt)) if str(path) not in known]
    found = [_read(run, attempt, path, steps) for path in paths]
    return sorted((row for row in found if row is not None), key=lambda row: (row.env_step or 0, row.created))


def format_of(path: Path) -> str:
    """What kind of checkpoint it is, by its first bytes; `unknown` when none of those we know."""
    if path.is_dir():
        return "palaestra" if (path / MANIFEST).is_file() else "unknown"
    try:
        with open(path, "rb") as file:
            beginning = file.read(16)
        if beginning.startswith(b"PK\x03\x04"):
            with zipfile.ZipFile(path) as archive:
                return "sb3_zip" if {SB3_WEIGHTS, "data"} <= set(archive.namelist()) else "torch_zip"
    except (OSError, zipfile.BadZipFile, NotImplementedError):
        return "unknown"
    return "safetensors" if beginning[8:9] == b"{" else "unknown"


def _patterns(attempt: Attempt) -> tuple[str, ...]:
    return (AttemptPlan.read(attempt) or AttemptPlan()).checkpoints


def _lying(attempt: Attempt, patterns: Sequence[str]) -> Iterator[Path]:
    """Candidates below an attempt; resolved, inside of it, each once."""
    seen: set[Path] = set()
    globs = [(attempt.checkpoints, "*"), (attempt.work / "checkpoints", "*")]
    for directory, pattern in [*globs, *((attempt.work, pattern) for pattern in patterns)]:
        for path in sorted(directory.glob(pattern)) if directory.is_dir() else []:
            root, where = attempt.path.resolve(), path.resolve()
            hidden = path.name.startswith(".") or path.name == attempt.best.name
            if hidden or where in seen or not where.is_relative_to(root) or len(seen) >= _MAX_FILES:
                continue
            seen.add(where)
            yield where


def _below(attempt: Attempt, announced: str) -> Path | None:
    """Where an announced checkpoint is; None when that is outside of its run, or nowhere."""
    root = attempt.path.parent.resolve()
    for base in (attempt.path, attempt.work):
        path = (base / announced).resolve()
        places = (root, attempt.path.resolve(), attempt.work.resolve())
        if path.is_relative_to(root) and path not in places and path.exists():
            return path
    return None


def _read(run: RunRecord, attempt: Attempt, path: Path, steps: AttemptSteps) -> CheckpointRecord | None:
    try:
        found, created = digest_path(path), path.stat().st_mtime
    except (OSError, ValueError):
        return None  # being written, or gone again
    own = OwnCheckpoint.read(path) if path.is_dir() else None
    env_step, source = steps.step_of(path, own)
    best = read_json(path.parent / attempt.best.name) or {}
    plan = AttemptPlan.read(attempt)
    known = dict(plan.env_signature) if plan is not None and plan.env_signature else {"env_id": run.env_id}
    return CheckpointRecord(
        checkpoint_id=found.sha256[:16],
        run_id=run.run_id,
        agent_id=run.agent_id,
        env_id=run.env_id,
        attempt=attempt.number,
        env_step=env_step,
        step_source=source,
        path=str(path),
        sha256=found.sha256,
        size_bytes=found.size_bytes,
        format=format_of(path),
        created=created,
        best=best.get("checkpoint") == path.name,
        metric=None if own is None else own.score,
        env_signature=signature_of({**(own.env_signature if own else {}), **known}),
        metrics_digest=_digest(attempt, path, env_step),
    )


def _with_numbers(row: CheckpointRecord, attempt: Attempt, steps: AttemptSteps) -> CheckpointRecord:
    """A row with the step and the returns that are known by now."""
    path = Path(row.path)
    step, source = row.env_step, row.step_source
    if source in ("", "log", "unknown"):
        step, source = steps.step_of(path, OwnCheckpoint.read(path) if path.is_dir() else None)
    return replace(row, env_step=step, step_source=source, metrics_digest=_digest(attempt, path, step))


def _digest(attempt: Attempt, path: Path, env_step: int | None) -> dict[str, float]:
    """Returns at the moment of a checkpoint: the last, the mean of a hundred, the best of all so far."""
    from palaestra.runs.series.reader import SeriesReader

    series = SeriesReader(attempt.series)
    recent = [] if env_step is None else [point.value for point in series.recent(_RETURNS, 100, env_step + 1)]
    if not recent:
        own = OwnCheckpoint.read(path) if path.is_dir() else None
        return own.digest() if own is not None else {}
    # The highest of every stretch is among the decimated points.
    best = max(point.value for point in series.decimate(_RETURNS, 400, last=env_step))
    return {"last": recent[-1], "best": best, "mean_100": sum(recent) / len(recent)}
