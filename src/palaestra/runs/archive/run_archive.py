"""Archives, deletes and restores runs, and executes the actions of the retention policy.

A run's directory, its row and the rows of its checkpoints change together. Nothing is removed before its copy was read
back, and an interrupted operation is completed by repeating it.

archive/<run_id>.tar.gz and <run_id>.json hold the package of a run, and its row and links
trash/<run_id>.<time>/ holds a deleted run until it is purged
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, replace
from pathlib import Path

from palaestra.errors import ConfigError, IllegalTransition, UnknownRun
from palaestra.files.atomic import atomic_file, read_json, sync, sync_tree, write_json
from palaestra.files.home import Home
from palaestra.files.run_directory import RunDirectory, check_run_id
from palaestra.runs.archive.package import (
    PACKAGE_ERRORS,
    directory_size,
    extract_package,
    find_missing,
    read_links,
    verify_package,
    write_package,
)
from palaestra.runs.archive.retention import RetentionAction, RetentionPolicy, plan_checkpoint_pruning, plan_retention
from palaestra.runs.checkpoints.catalogue import CheckpointCatalogue
from palaestra.runs.checkpoints.deploy import find_deployed_paths
from palaestra.runs.record import RunRecord
from palaestra.runs.store.rebuild import read_archived_run, read_run
from palaestra.runs.store.registry import Registry
from palaestra.runs.video.clip import list_clips, prune_clips

_KEPT_LOG_BYTES = 5 << 20
"""Kept of a long output, at the beginning and at the end."""


class RunArchive:
    """The archive and the trash of one state directory. The methods block."""

    def __init__(
        self,
        home: Home,
        registry: Registry,
        catalogue: CheckpointCatalogue | None,
        policy: RetentionPolicy,
        clock: Callable[[], float],
    ) -> None:
        self._home, self._registry, self._catalogue = home, registry, catalogue
        self._policy, self._clock = policy, clock

    def archive(self, record: RunRecord) -> RunRecord:
        """Pack a run."""
        if record.archived:
            return record
        self._check_not_deployed(record)
        return self._update_rows(pack_run(self._home, record, self._clock()))

    def resolve_id(self, prefix: str) -> str:
        """The id of the only archived or deleted run with this prefix; the prefix itself when there is none."""
        run_ids = {run.run_id for run in self._registry.runs(archived=True)} | set(list_trash(self._home))
        if prefix in run_ids or self._registry.get(check_run_id(prefix)) is not None:
            return prefix
        matches = sorted(run_id for run_id in run_ids if run_id.startswith(prefix))
        if len(matches) > 1:
            raise UnknownRun("run", prefix, "is a prefix of several runs", f"Which of {', '.join(matches[:5])}?")
        return matches[0] if matches else prefix

    def restore(self, run_id: str) -> RunRecord:
        """Unpack an archived run, or restore a deleted one, which is unpacked as well."""
        record = self._registry.get(check_run_id(run_id))
        if record is None:
            return self._update_rows(restore_from_trash(self._home, run_id))
        if not record.archived:
            raise IllegalTransition(f"{run_id} is neither archived nor deleted")
        return self._update_rows(unpack_run(self._home, record))

    def delete(self, record: RunRecord) -> None:
        """Move a run to the trash; `restore` restores it until it is purged."""
        self._check_not_deployed(record)
        move_to_trash(self._home, record, self._clock())
        self._registry.delete(record.run_id)

    def plan(self, supervised: Collection[str]) -> list[RetentionAction]:
        """All actions of the retention policy. Supervised runs, favorites and deployed checkpoints are kept."""
        every_run = [*self._registry.runs(), *self._registry.runs(archived=True)]
        candidates = [run for run in every_run if run.run_id not in supervised and not run.favorite]
        deployed = find_deployed_paths(self._home)
        root = self._home.runs.resolve()
        protected = {path.relative_to(root).parts[0] for path in deployed if path.is_relative_to(root)}
        actions = plan_retention(candidates, self._policy, self._clock(), protected)
        leaving = {action.run_id for action in actions}
        ended = [run for run in candidates if run.phase.has_ended and run.supervised and not run.archived]
        staying = [run for run in ended if run.run_id not in leaving]
        if self._policy.keep_checkpoints is not None:
            paths = {str(path) for path in deployed}
            checkpoints = self._registry.checkpoints()
            actions += plan_checkpoint_pruning(staying, checkpoints, self._policy.keep_checkpoints, paths)
        for run in staying:
            actions += self._plan_trimming(run.run_id)
        return [*actions, *self._plan_purge()]

    def apply(self, action: RetentionAction, record: RunRecord) -> None:
        """Execute an action on a run; see `purge` for the trash. Refuses a favorite, which it was not when planned."""
        if record.favorite:
            raise IllegalTransition(f"{record.run_id} has been marked as a favorite")
        run = self._home.run(record.run_id)
        if action.action == "archive":
            self.archive(record)
        elif action.action == "delete":
            self.delete(record)
        elif action.action == "prune":
            for path in map(Path, action.paths):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
            self._update_checkpoint_rows(record)
        elif action.action == "clips":
            prune_clips(run, self._policy.keep_clips or 0)
        elif action.action == "shorten":
            for attempt in run.attempts():
                shorten_log(attempt.stdout, self._policy.log_mb)

    def purge(self, action: RetentionAction) -> None:
        """Permanently remove a run in the trash."""
        for path in action.paths:
            shutil.rmtree(path)

    def _plan_trimming(self, run_id: str) -> Iterator[RetentionAction]:
        run, keep, log_mb = self._home.run(run_id), self._policy.keep_clips, self._policy.log_mb
        surplus = [] if keep is None else list_clips(run)[keep:]
        if surplus:
            size = sum(clip.size_bytes for clip in surplus)
            paths = tuple(clip.path for clip in surplus)
            yield RetentionAction(run_id, "clips", f"{len(surplus)} clips beyond the newest {keep}", size, paths)
        log_bytes = sum(surplus_bytes(attempt.stdout, log_mb) for attempt in run.attempts())
        if log_bytes:
            why = f"an output is longer than {log_mb} MB; its middle is removed"
            yield RetentionAction(run_id, "shorten", why, log_bytes)

    def _plan_purge(self) -> Iterator[RetentionAction]:
        limit = self._policy.undo_days
        for run_id, path, days in find_purgeable(self._home, limit, self._clock()):
            why = f"deleted {days:.0f} days ago; deleted runs are kept {limit:g}"
            yield RetentionAction(run_id, "purge", why, directory_size(path), (str(path),))

    def _check_not_deployed(self, record: RunRecord) -> None:
        directory = self._home.run(record.run_id).path.resolve()
        for path, deployment in find_deployed_paths(self._home).items():
            if path.is_relative_to(directory):
                reason = f"{path} is or was deployed in {deployment.env_id}"
                remedy = f"palaestra checkpoints deploy {deployment.checkpoint_id} copies it; then try again"
                raise ConfigError("run", record.run_id, reason, remedy)

    def _update_rows(self, record: RunRecord) -> RunRecord:
        self._registry.put(record)
        self._update_checkpoint_rows(record)
        return record

    def _update_checkpoint_rows(self, record: RunRecord) -> None:
        if self._catalogue is not None:
            self._catalogue.refresh_run(self._home, record)


def pack_run(home: Home, record: RunRecord, now: float) -> RunRecord:
    """Replace the directory of a run by a package; the record of the packed run."""
    run = home.run(record.run_id)
    package = _package_path(home, record.run_id)
    package.parent.mkdir(parents=True, exist_ok=True)
    partial = package.with_name(f".{record.run_id}.new")
    try:
        if read_run(run) is None:
            raise ConfigError("run", record.run_id, f"{run.path} holds no run", "There is nothing to pack")
        _move_old_package(home, record, now)
        contents = write_package(partial, run.path)
        verify_package(partial, run.path)
        sync(partial)
        packed = replace(record, archived=True, bytes_on_disk=partial.stat().st_size, watchdog=None, trainer=None)
        partial.replace(package)
        row = asdict(replace(packed, alarms=()))
        note = {"schema": 1, **row, "links": contents.links, "left_out": contents.left_out}
        write_json(_note_path(package), note)
        sync(package.parent)
    except PACKAGE_ERRORS as error:
        raise ConfigError("run", record.run_id, f"cannot be packed ({error})", "It was not changed") from None
    finally:
        partial.unlink(missing_ok=True)
    # One rename hides the directory, so that no reader sees half a run.
    hidden = home.runs / f".{run.path.name}.gone"
    run.path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
    return packed


def unpack_run(home: Home, record: RunRecord) -> RunRecord:
    """Replace the package of a run by its directory; the record of the run."""
    package = _package_path(home, record.run_id)
    _restore_directory(home, record.run_id, package)
    package.unlink(missing_ok=True)
    _note_path(package).unlink(missing_ok=True)
    return replace(record, archived=False, bytes_on_disk=directory_size(home.run(record.run_id).path))


def move_to_trash(home: Home, record: RunRecord, now: float) -> Path:
    """Move a run, packed or not, to the trash; its new path."""
    return _move_parts(home, record.run_id, now, home.run(record.run_id).path, _package_path(home, record.run_id))


def list_trash(home: Home) -> dict[str, Path]:
    """Deleted runs that can be restored: the last deletion of each run id."""
    newest: dict[str, tuple[tuple[int, int], Path]] = {}
    for entry in home.trash.glob("*.*"):
        run_id, _, when = entry.name.rpartition(".")
        since, _, number = when.partition("-")
        if since.isdecimal() and ((entry / run_id).is_dir() or (entry / f"{run_id}.tar.gz").is_file()):
            order = (int(since), int(number) if number.isdecimal() else 1)
            newest[run_id] = max(newest.get(run_id, (order, entry)), (order, entry))
    return {run_id: entry for run_id, (_, entry) in newest.items()}


def restore_from_trash(home: Home, run_id: str) -> RunRecord:
    """Restore the last deletion of a run id; a packed run is unpacked."""
    entry = list_trash(home).get(run_id)
    if entry is None:
        raise UnknownRun("run", run_id, "is neither archived nor in the trash", "palaestra runs list --archived")
    run, deleted = home.run(run_id), entry / run_id
    if deleted.is_dir():
        if os.path.lexists(run.path):
            raise _path_exists(run, str(deleted))
        if read_run(RunDirectory(deleted)) is None:
            raise UnknownRun("run", run_id, "the deleted directory holds no run", f"Look at {deleted}")
        run.path.parent.mkdir(parents=True, exist_ok=True)
        deleted.rename(run.path)
    else:
        _restore_directory(home, run_id, entry / f"{run_id}.tar.gz")
    record = read_archived_run(entry / f"{run_id}.json") or read_run(run)
    if record is None:
        raise UnknownRun("run", run_id, "its directory holds no run", f"Look at {run.path}")
    shutil.rmtree(entry, ignore_errors=True)
    return replace(record, archived=False, bytes_on_disk=directory_size(run.path))


def find_purgeable(home: Home, undo_days: float, now: float) -> Iterator[tuple[str, Path, float]]:
    """Run id, path and age in days of every entry of the trash that is old enough."""
    for entry in sorted(home.trash.glob("*.*")):
        run_id, _, when = entry.name.rpartition(".")
        since = when.partition("-")[0]
        if since.isdecimal() and now - int(since) >= undo_days * 86_400:
            yield run_id, entry, (now - int(since)) / 86_400


def surplus_bytes(log: Path, log_mb: int) -> int:
    """Number of bytes to remove from the middle of an output."""
    try:
        size = log.stat().st_size
    except OSError:
        return 0
    return size - 2 * _KEPT_LOG_BYTES if size > log_mb << 20 else 0


def shorten_log(log: Path, log_mb: int) -> int:
    """Remove the middle of a long output; the number of bytes removed."""
    surplus = surplus_bytes(log, log_mb)
    if not surplus:
        return 0
    with open(log, "rb") as source, atomic_file(log, mode=0o600, durable=False) as target:
        target.write(source.read(_KEPT_LOG_BYTES))
        target.write(f"\n[... {surplus} bytes were removed by the retention policy ...]\n".encode())
        source.seek(_KEPT_LOG_BYTES + surplus)
        shutil.copyfileobj(source, target)
    return surplus


def _restore_directory(home: Home, run_id: str, package: Path) -> None:
    """Extract a package completely or not at all; a directory that already holds all of it is kept."""
    run, partial = home.run(run_id), home.runs / f".{run_id}.restore"
    links = read_links(read_json(_note_path(package)))
    shutil.rmtree(partial, ignore_errors=True)
    try:
        if os.path.lexists(run.path):
            if not run.path.is_dir() or find_missing(run.path, package, links):
                raise _path_exists(run, str(package))
            return
        home.runs.mkdir(parents=True, exist_ok=True)
        extracted = extract_package(package, partial, run_id, links)
        sync_tree(extracted)
        extracted.rename(run.path)
        sync(home.runs)
    except PACKAGE_ERRORS as error:
        raise ConfigError("archive", str(package), f"cannot be restored ({error})", "It was not changed") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _path_exists(run: RunDirectory, source: str) -> ConfigError:
    remedy = f"Move it elsewhere and restore again; {source} was not changed"
    return ConfigError("run", run.run_id, f"{run.path} exists and is not the run to restore", remedy)


def _move_old_package(home: Home, record: RunRecord, now: float) -> None:
    """Move an older package of the same run id to the trash, if it holds files that the directory does not."""
    package = _package_path(home, record.run_id)
    if not package.exists():
        return
    try:
        links = read_links(read_json(_note_path(package)))
        if not find_missing(home.run(record.run_id).path, package, links):
            return
    except PACKAGE_ERRORS:
        pass
    _move_parts(home, record.run_id, now, package)


def _move_parts(home: Home, run_id: str, now: float, *parts: Path) -> Path:
    """Move files of a run to a new entry of the trash."""
    entry = home.trash / f"{run_id}.{int(now)}"
    number = 1
    while entry.exists():
        number += 1
        entry = entry.with_name(f"{run_id}.{int(now)}-{number}")
    entry.mkdir(parents=True)
    note = _note_path(_package_path(home, run_id))
    # Copied first: the note is beside the package at every moment, even if this process is killed.
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(note, entry / note.name)
    for part in parts:
        with contextlib.suppress(FileNotFoundError):
            part.rename(entry / part.name)
    note.unlink(missing_ok=True)
    return entry


def _package_path(home: Home, run_id: str) -> Path:
    return home.archive / f"{run_id}.tar.gz"


def _note_path(package: Path) -> Path:
    """The note beside a package: the row of the run, and its links."""
    return package.with_name(package.name.removesuffix(".tar.gz") + ".json")
