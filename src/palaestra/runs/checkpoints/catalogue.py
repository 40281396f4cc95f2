"""The list of checkpoints: those that trainers announce, and those found in the directories of runs.

Registry rows are an index that can be rebuilt from the files. Checkpoints outside the directory of their run are not
listed, and the row of a file that the trainer removed is deleted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from palaestra.errors import ConfigError
from palaestra.files.atomic import read_json
from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.runs.checkpoints.files import (
    AttemptSteps,
    PalaestraCheckpoint,
    announced_paths,
    detect_format,
    digest_path,
    summarize_returns,
)
from palaestra.runs.checkpoints.signature import normalize_signature
from palaestra.runs.record import CheckpointRecord, RunRecord
from palaestra.runs.state.attempt_files import AttemptPlan
from palaestra.runs.store.database import RegistryCorrupt
from palaestra.runs.store.rebuild import list_imported, read_run
from palaestra.runs.store.registry import Registry, open_registry_read_only
from palaestra.telemetry.event import CheckpointSaved, Record

_MAX_FILES = 10_000
_RETURNS = "episode/return"


class CheckpointCatalogue:
    """Keeps the registry rows of checkpoints up to date. Thread-safe; every method can be repeated."""

    def __init__(self, registry: Registry, clock: Callable[[], float] = time.time) -> None:
        self._registry, self._clock = registry, clock

    def add_announced(self, run: RunRecord, attempt: Attempt, records: Sequence[Record]) -> None:
        """Add the checkpoints that a trainer announced in these records."""
        steps = AttemptSteps(attempt)
        for _, when, event in records:
            if isinstance(event, CheckpointSaved):
                path = _resolve_announced(attempt, event.path)
                row = None if path is None else _read_checkpoint(run, attempt, path, steps)
                if row is not None:
                    self._put(self._apply_announcement(row, event, when))
        self._delete_missing(run.run_id)

    def scan_attempt(self, run: RunRecord, attempt: Attempt, patterns: Sequence[str]) -> None:
        """Add the checkpoints of an ended attempt that were not announced, and complete the rows of the others."""
        known = {row.path: row for row in self._registry.checkpoints(run_id=run.run_id)}
        steps = AttemptSteps(attempt)
        added = []
        for path in _candidates(attempt, patterns):
            row = known.get(str(path))
            if row is None:
                row = _read_checkpoint(run, attempt, path, steps)
                announcement = steps.announcements.get(path)
                if row is not None and announcement is not None:
                    row = self._apply_announcement(row, announcement[1], announcement[0])
                if row is not None:
                    added.append(row)
            elif row.attempt == attempt.number:
                # Metrics of that moment may not have been written yet when it was announced.
                changed = _update_metrics(row, attempt, steps)
                if changed != row:
                    self._registry.put_checkpoint(changed)
        for row in sorted(added, key=lambda row: row.created):
            self._put(row)
        self._delete_missing(run.run_id)

    def add_missing(self, home: Home, should_stop: Callable[[], bool] = lambda: False) -> int:
        """Add checkpoints of runs without rows, such as after the registry was rebuilt; return their number."""
        rows = self._registry.checkpoints()
        listed = {row.run_id for row in rows}
        # Rows of an earlier version have the step of the run instead of the file's, and no source of it.
        outdated = {row.run_id for row in rows if row.run_id and not row.step_source}
        added = 0
        for run in self._registry.runs():
            if should_stop():
                break
            if run.run_id in listed and run.run_id not in outdated:
                continue
            has_checkpoints = self._scan_run(home, run)
            if has_checkpoints and run.run_id not in listed:
                added += len(self._registry.checkpoints(run_id=run.run_id))
        return added

    def refresh_run(self, home: Home, run: RunRecord) -> None:
        """Update the rows of a run that was archived, restored or deleted."""
        self._delete_missing(run.run_id)
        self._scan_run(home, run)

    def _scan_run(self, home: Home, run: RunRecord) -> bool:
        attempts = _attempts_with_checkpoints(home.run(run.run_id))
        for attempt in attempts:
            self.scan_attempt(run, attempt, _patterns(attempt))
        return bool(attempts)

    def _apply_announcement(self, row: CheckpointRecord, event: CheckpointSaved, when: float) -> CheckpointRecord:
        sha256 = event.sha256 or row.sha256
        return replace(
            row,
            checkpoint_id=sha256[:16],
            sha256=sha256,
            env_step=event.env_step,
            step_source="announced",
            created=when,
            best=event.best,
            metric=event.metric if event.metric is not None else row.metric,
            # The announced hash is authoritative; different bytes are damaged.
            verified=None if sha256 == row.sha256 else -self._clock(),
        )

    def _put(self, record: CheckpointRecord) -> None:
        rows = self._registry.checkpoints(run_id=record.run_id)
        existing = next((row for row in rows if row.path == record.path), None)
        if existing is not None and existing.sha256 == record.sha256:
            record = replace(record, verified=existing.verified, best=record.best or existing.best)
        self._registry.put_checkpoint(record)
        if record.best:
            for row in rows:
                if row.best and row.path != record.path and row.created <= record.created:
                    self._registry.put_checkpoint(replace(row, best=False))

    def _delete_missing(self, run_id: str) -> None:
        for row in self._registry.checkpoints(run_id=run_id):
            if not Path(row.path).exists():
                self._registry.delete_checkpoint(row.path)


def find_checkpoints(run: RunRecord, attempt: Attempt, known: Collection[str] = ()) -> list[CheckpointRecord]:
    """Read the checkpoints of an attempt from its files, oldest first, except known paths."""
    steps = AttemptSteps(attempt)
    paths = [path for path in _candidates(attempt, _patterns(attempt)) if str(path) not in known]
    rows = [_read_checkpoint(run, attempt, path, steps) for path in paths]
    return sorted((row for row in rows if row is not None), key=lambda row: (row.env_step or 0, row.created))


def list_checkpoints(
    home: Home, *, run_id: str | None = None, agent_id: str | None = None, env_id: str | None = None
) -> list[CheckpointRecord]:
    """List matching checkpoints of a state directory, newest first, with or without a service. Changes nothing."""
    # Files may have been archived or removed since their row was written.
    rows = {row.path: row for row in _read_rows(home) if Path(row.path).exists()}
    listed = {row.run_id for row in rows.values()}
    checkpoints = [*rows.values(), *(row for row in list_imported(home) if row.path not in rows)]
    for directory in sorted(home.runs.iterdir()) if home.runs.is_dir() else []:
        if directory.name.startswith(".") or run_id not in (None, directory.name):
            continue
        # Rows of a run started with `palaestra train` may be incomplete, because it does not announce to a service.
        if directory.name in listed and home.run(directory.name).spec.exists():
            continue
        attempts = _attempts_with_checkpoints(home.run(directory.name))
        run = read_run(home.run(directory.name)) if attempts else None
        if run is not None:
            rows_on_disk = (row for attempt in attempts for row in find_checkpoints(run, attempt))
            checkpoints += [row for row in rows_on_disk if row.path not in rows]
    filters = {"run_id": run_id, "agent_id": agent_id, "env_id": env_id}
    matching = [
        row
        for row in checkpoints
        if all(value is None or getattr(row, name) == value for name, value in filters.items())
    ]
    return sorted(matching, key=lambda row: (row.created, row.path), reverse=True)


def get_checkpoint(home: Home, name: str) -> CheckpointRecord:
    """Return the checkpoint with this id prefix or path. Raises `ConfigError` when there is none, or several."""
    # Of several copies, one in a run has more metadata than an imported one; the newest of them is used.
    ordered = sorted(reversed(list_checkpoints(home)), key=lambda row: bool(row.run_id))
    matches = {row.sha256: row for row in ordered if row.checkpoint_id.startswith(name) or row.path == name}
    if len(matches) == 1 and name:
        return next(iter(matches.values()))
    if len(matches) > 1:
        ids = ", ".join(sorted(row.checkpoint_id for row in matches.values())[:4])
        raise ConfigError("checkpoint", name, f"several ids begin with it ({ids})", "Give more characters of the id")
    raise ConfigError("checkpoint", name, "no such checkpoint", "palaestra checkpoints list shows all checkpoints")


def _read_rows(home: Home) -> list[CheckpointRecord]:
    try:
        registry = open_registry_read_only(home)
        if registry is None:
            return []
        try:
            return registry.checkpoints()
        finally:
            registry.close()
    except RegistryCorrupt:
        return []  # the files are still there


def _patterns(attempt: Attempt) -> tuple[str, ...]:
    return AttemptPlan.read(attempt).checkpoints


def _attempts_with_checkpoints(run: RunDirectory) -> list[Attempt]:
    # Reads no file, because thousands of runs have no checkpoint.
    return [attempt for attempt in run.attempts() if next(_candidates(attempt, _patterns(attempt)), None) is not None]


def _candidates(attempt: Attempt, patterns: Collection[str]) -> Iterator[Path]:
    """Yield the resolved paths below an attempt that may be checkpoints, each once."""
    seen: set[Path] = set()
    globs = [(attempt.checkpoints, "*"), (attempt.work / "checkpoints", "*")]
    for directory, pattern in [*globs, *((attempt.work, pattern) for pattern in patterns)]:
        for path in sorted(directory.glob(pattern)) if directory.is_dir() else []:
            root, resolved = attempt.path.resolve(), path.resolve()
            is_hidden = path.name.startswith(".") or path.name == attempt.best.name
            if is_hidden or resolved in seen or not resolved.is_relative_to(root) or len(seen) >= _MAX_FILES:
                continue
            seen.add(resolved)
            yield resolved


def _resolve_announced(attempt: Attempt, announced: str) -> Path | None:
    """Return the path of an announced checkpoint; None when it is missing or outside its run."""
    root = attempt.path.parent.resolve()
    for path in announced_paths(attempt, announced):
        directories = (root, attempt.path.resolve(), attempt.work.resolve())
        if path.is_relative_to(root) and path not in directories and path.exists():
            return path
    return None


def _read_checkpoint(run: RunRecord, attempt: Attempt, path: Path, steps: AttemptSteps) -> CheckpointRecord | None:
    try:
        digest, created = digest_path(path), path.stat().st_mtime
    except (OSError, ValueError):
        return None  # still being written, or removed again
    own = PalaestraCheckpoint.read(path)
    env_step, source = steps.find_step(path, own)
    best = read_json(path.parent / attempt.best.name) or {}
    plan = AttemptPlan.read(attempt)
    signature = plan.env_signature or {"env_id": run.env_id}
    return CheckpointRecord(
        checkpoint_id=digest.sha256[:16],
        run_id=run.run_id,
        agent_id=run.agent_id,
        env_id=run.env_id,
        attempt=attempt.number,
        env_step=env_step,
        step_source=source,
        path=str(path),
        sha256=digest.sha256,
        size_bytes=digest.size_bytes,
        format=detect_format(path),
        created=created,
        best=best.get("checkpoint") == path.name,
        metric=None if own is None else own.score,
        env_signature=normalize_signature({**(own.env_signature if own else {}), **signature}),
        metrics_digest=_summarize_metrics(attempt, own, env_step),
        offline_dataset=plan.offline_dataset if own is None else own.offline_dataset,
    )


def _update_metrics(row: CheckpointRecord, attempt: Attempt, steps: AttemptSteps) -> CheckpointRecord:
    """Fill in the step and the returns that are known by now."""
    path, step, source = Path(row.path), row.env_step, row.step_source
    own = PalaestraCheckpoint.read(path)
    if source in ("", "log", "unknown"):
        step, source = steps.find_step(path, own)
    # Rows of an earlier version have no dataset.
    dataset = row.offline_dataset if own is None else own.offline_dataset
    metrics = _summarize_metrics(attempt, own, step)
    return replace(row, env_step=step, step_source=source, metrics_digest=metrics, offline_dataset=dataset)


def _summarize_metrics(attempt: Attempt, own: PalaestraCheckpoint | None, env_step: int | None) -> dict[str, float]:
    """Return the last return, the mean of the last 100 and the best so far, at the step of a checkpoint."""
    from palaestra.runs.series.reader import SeriesReader

    series = SeriesReader(attempt.series)
    recent = () if env_step is None else tuple(point.value for point in series.recent(_RETURNS, 100, env_step + 1))
    if not recent:
        return summarize_returns(own.returns) if own is not None else {}
    # Decimation keeps the highest point of every bin.
    best = max(point.value for point in series.decimate(_RETURNS, 400, last=env_step))
    return {**summarize_returns(recent), "best": best}
