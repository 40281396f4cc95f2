"""Packing, restoring and throwing away: the acting half of retention. Nothing is removed before its copy was read back.

archive/<run_id>.tar.gz and .json (its row, and the links it had)
trash/<run_id>.<time>/ holds what was thrown away, until it is purged
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from palaestra.errors import ConfigError, UnknownRun
from palaestra.files.atomic import atomic_file, read_json, sync, sync_tree, write_json
from palaestra.files.home import Home
from palaestra.files.run_directory import RunDirectory
from palaestra.runs.archive.package import UNREADABLE, links_beside, missing_from, read_back, unpack_into, write
from palaestra.runs.record import RunRecord
from palaestra.runs.store.rebuild import read_archived_run, read_run

__all__ = [
    "pack",
    "purgeable",
    "shorten_log",
    "size_of",
    "surplus_of",
    "throw_away",
    "thrown_away",
    "undelete",
    "unpack",
]

_KEPT_BYTES = 5 << 20


def pack(home: Home, record: RunRecord, now: float) -> RunRecord:
    """Turn a run's directory into a package that was read back; the row of the packed run."""
    run = home.run(record.run_id)
    package = _package(home, record.run_id)
    package.parent.mkdir(parents=True, exist_ok=True)
    unfinished = package.with_name(f".{record.run_id}.new")
    try:
        if read_run(run) is None:
            raise ConfigError("run", record.run_id, f"{run.path} holds no run", "There is nothing to pack")
        _make_way(home, record, now)
        found = write(unfinished, run.path)
        read_back(unfinished, run.path)
        sync(unfinished)
        packed = replace(record, archived=True, bytes_on_disk=unfinished.stat().st_size, warden=None, trainer=None)
        unfinished.replace(package)
        row = asdict(replace(packed, alarms=()))
        write_json(_note(package), {"schema": 1, **row, **found.note()})
        sync(package.parent)
    except UNREADABLE as error:
        raise ConfigError("run", record.run_id, f"cannot be packed ({error})", "It was left as it is") from None
    finally:
        unfinished.unlink(missing_ok=True)
    _remove(home, run.path)
    return packed


def unpack(home: Home, record: RunRecord) -> RunRecord:
    """Make a packed run's directory again; its row."""
    package = _package(home, record.run_id)
    _unpacked(home, record.run_id, package)
    package.unlink(missing_ok=True)
    _note(package).unlink(missing_ok=True)
    return replace(record, archived=False, bytes_on_disk=size_of(home.run(record.run_id).path))


def throw_away(home: Home, record: RunRecord, now: float) -> Path:
    """Move a run, packed or not, to the trash; where it is now."""
    return _binned(home, record.run_id, now, home.run(record.run_id).path, _package(home, record.run_id))


def thrown_away(home: Home) -> dict[str, Path]:
    """Where everything lies that can be brought back, by the id of the run; of several, the last."""
    found: dict[str, tuple[tuple[int, int], Path]] = {}
    for bin_ in home.trash.glob("*.*"):
        run_id, _, when = bin_.name.rpartition(".")
        since, _, number = when.partition("-")
        if since.isdecimal() and ((bin_ / run_id).is_dir() or (bin_ / f"{run_id}.tar.gz").is_file()):
            order = (int(since), int(number) if number.isdecimal() else 1)
            found[run_id] = max(found.get(run_id, (order, bin_)), (order, bin_))
    return {run_id: bin_ for run_id, (_, bin_) in found.items()}


def undelete(home: Home, run_id: str) -> RunRecord:
    """Bring back what was thrown away last under this id; one that was packed is unpacked."""
    bin_ = thrown_away(home).get(run_id)
    if bin_ is None:
        raise UnknownRun("run", run_id, "is neither archived nor in the trash", "palaestra runs list --archived")
    run, thrown = home.run(run_id), bin_ / run_id
    if thrown.is_dir():
        if os.path.lexists(run.path):
            raise _in_the_way(run, str(thrown))
        if read_run(RunDirectory(thrown)) is None:
            raise UnknownRun("run", run_id, "what was thrown away holds no run", f"Look at {thrown}")
        run.path.parent.mkdir(parents=True, exist_ok=True)
        thrown.rename(run.path)
    else:
        _unpacked(home, run_id, bin_ / f"{run_id}.tar.gz")
    record = read_archived_run(bin_ / f"{run_id}.json") or read_run(run)
    if record is None:
        raise UnknownRun("run", run_id, "its directory holds no run", f"Look at {run.path}")
    shutil.rmtree(bin_, ignore_errors=True)
    return replace(record, archived=False, bytes_on_disk=size_of(run.path))


def purgeable(home: Home, undo_days: float, now: float) -> Iterator[tuple[str, Path, float]]:
    """What was thrown away long enough ago: whose it was, where it lies, and for how many days."""
    for bin_ in sorted(home.trash.glob("*.*")):
        run_id, _, when = bin_.name.rpartition(".")
        since = when.partition("-")[0]
        if since.isdecimal() and now - int(since) >= undo_days * 86_400:
            yield run_id, bin_, (now - int(since)) / 86_400


def surplus_of(log: Path, log_mb: int) -> int:
    """How many bytes in the middle of an output are too many."""
    try:
        size = log.stat().st_size
    except OSError:
        return 0
    return size - 2 * _KEPT_BYTES if size > log_mb << 20 else 0


def shorten_log(log: Path, log_mb: int) -> int:
    """Of a long output keep the beginning and the end; how many bytes went."""
    gone = surplus_of(log, log_mb)
    if not gone:
        return 0
    with open(log, "rb") as source, atomic_file(log, mode=0o600, durable=False) as target:
        target.write(source.read(_KEPT_BYTES))
        target.write(f"\n[... {gone} bytes were removed by the retention policy ...]\n".encode())
        source.seek(_KEPT_BYTES + gone)
        shutil.copyfileobj(source, target)
    return gone


def _unpacked(home: Home, run_id: str, package: Path) -> None:
    """A package's directory, made whole or not at all; one that holds all of it already was made before."""
    run, unfinished = home.run(run_id), home.runs / f".{run_id}.restore"
    links = links_beside(read_json(_note(package)))
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        if os.path.lexists(run.path):
            if not run.path.is_dir() or missing_from(run.path, package, links):
                raise _in_the_way(run, str(package))
            return
        home.runs.mkdir(parents=True, exist_ok=True)
        made = unpack_into(unfinished, package, run_id, links)
        sync_tree(made)
        made.rename(run.path)
        sync(home.runs)
    except UNREADABLE as error:
        raise ConfigError("archive", str(package), f"cannot be restored ({error})", "It was left as it is") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _in_the_way(run: RunDirectory, stays: str) -> ConfigError:
    remedy = f"Move it elsewhere and restore again; {stays} was left as it is"
    return ConfigError("run", run.run_id, f"{run.path} is in the way and is not what was put away", remedy)


def _make_way(home: Home, record: RunRecord, now: float) -> None:
    """A package of this id that holds more than the directory does is somebody's work, too: to the trash with it."""
    package = _package(home, record.run_id)
    if package.exists():
        try:
            links = links_beside(read_json(_note(package)))
            useless = not missing_from(home.run(record.run_id).path, package, links)
        except UNREADABLE:
            useless = False
        if not useless:
            _binned(home, record.run_id, now, package)


def _binned(home: Home, run_id: str, now: float, *parts: Path) -> Path:
    bin_ = home.trash / f"{run_id}.{int(now)}"
    number = 1
    while bin_.exists():
        number += 1
        bin_ = bin_.with_name(f"{run_id}.{int(now)}-{number}")
    bin_.mkdir(parents=True)
    note = _note(_package(home, run_id))
    # Wherever the package is when somebody kills us, its note is beside it.
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(note, bin_ / note.name)
    for part in parts:
        with contextlib.suppress(FileNotFoundError):
            part.rename(bin_ / part.name)
    note.unlink(missing_ok=True)
    return bin_


def _package(home: Home, run_id: str) -> Path:
    return home.archive / f"{run_id}.tar.gz"


def _note(package: Path) -> Path:
    """The packed run's row, and what is not in its package."""
    return package.with_name(package.name.removesuffix(".tar.gz") + ".json")


def _remove(home: Home, directory: Path) -> None:
    """Out of sight with one rename, so that nobody ever sees half a run."""
    plan_retention = home.runs / f".{directory.name}.gone"
    directory.rename(plan_retention)
    shutil.rmtree(plan_retention, ignore_errors=True)


def size_of(directory: Path) -> int:
    """Bytes of all files below."""
    total = 0
    for base, _, names in os.walk(directory, onerror=None):
        for name in names:
            try:
                total += os.lstat(os.path.join(base, name)).st_size
            except OSError:
                continue
    return total
