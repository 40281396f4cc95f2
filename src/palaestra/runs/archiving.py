"""Packing, restoring and throwing away: the acting half of retention. Nothing is removed before its copy was read back.

archive/<run_id>.tar.gz and .json (its row)        trash/<run_id>.<time>/ holds what was thrown away, until it is purged
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tarfile
import zlib
from dataclasses import asdict, replace
from pathlib import Path

from palaestra.errors import ConfigError, UnknownRun
from palaestra.runs.durable import write_json
from palaestra.runs.layout import Home, RunPaths
from palaestra.runs.record import RunRecord
from palaestra.runs.store.rebuild import read_packed, read_run

__all__ = ["pack", "purge", "shorten_log", "throw_away", "undelete", "unpack"]

_KEPT_BYTES = 5 << 20
_BLOCK = 1 << 20


def pack(home: Home, record: RunRecord) -> RunRecord:
    """Turn a run's directory into a package that was read back; the row of the packed run."""
    run = home.run(record.run_id)
    archive = home.path / "archive"
    archive.mkdir(parents=True, exist_ok=True)
    package, unfinished = archive / f"{record.run_id}.tar.gz", archive / f".{record.run_id}.new"
    try:
        with tarfile.open(unfinished, "w:gz", compresslevel=6) as tar:
            tar.add(run.path, arcname=record.run_id)
        _verify(unfinished, run.path)
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        packed = replace(record, archived=True, bytes_on_disk=unfinished.stat().st_size, warden=None, trainer=None)
        unfinished.replace(package)
        write_json(package.with_name(f"{record.run_id}.json"), {"schema": 1, **asdict(replace(packed, alarms=()))})
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _remove(home, run.path)
    return packed


def unpack(home: Home, record: RunRecord) -> RunRecord:
    """Make a packed run's directory again; its row."""
    package = home.path / "archive" / f"{record.run_id}.tar.gz"
    target = home.run(record.run_id).path
    unfinished = home.runs / f".{record.run_id}.restore"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        home.runs.mkdir(parents=True, exist_ok=True)
        # One that is there is whole: somebody was interrupted after the renaming.
        if not target.exists():
            with tarfile.open(package, "r:gz") as tar:
                tar.extractall(unfinished, filter="data")
            (unfinished / record.run_id).rename(target)
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise ConfigError("archive", str(package), f"cannot be restored ({error})", "It was left as it is") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    package.unlink(missing_ok=True)
    package.with_name(f"{record.run_id}.json").unlink(missing_ok=True)
    return replace(record, archived=False)


def throw_away(home: Home, record: RunRecord, now: float) -> Path:
    """Move a run, packed or not, to the trash; where it is now."""
    bin_ = home.path / "trash" / f"{record.run_id}.{int(now)}"
    number = 1
    while bin_.exists():
        number += 1
        bin_ = bin_.with_name(f"{record.run_id}.{int(now)}-{number}")
    bin_.mkdir(parents=True)
    archive = home.path / "archive"
    parts = [home.run(record.run_id).path, archive / f"{record.run_id}.tar.gz", archive / f"{record.run_id}.json"]
    for part in parts:
        with contextlib.suppress(FileNotFoundError):
            part.rename(bin_ / part.name)
    return bin_


def undelete(home: Home, run_id: str) -> RunRecord:
    """Bring back what was thrown away last under this id, a packed run packed."""
    bins = sorted((home.path / "trash").glob(f"{run_id}.*"), key=lambda path: path.stat().st_mtime)
    package = f"{run_id}.tar.gz"
    found = [path for path in bins if (path / run_id).is_dir() or (path / package).is_file()]
    if not found:
        raise UnknownRun("run", run_id, "is neither archived nor in the trash", "palaestra runs list --archived")
    run = RunPaths(home.run(run_id).path)
    run.path.parent.mkdir(parents=True, exist_ok=True)
    if (found[-1] / run_id).is_dir():
        (found[-1] / run_id).rename(run.path)
        record = read_run(run)
    else:
        for part in (found[-1] / package, found[-1] / f"{run_id}.json"):
            part.rename(home.path / "archive" / part.name)
        record = read_packed(home.path / "archive" / f"{run_id}.json")
    shutil.rmtree(found[-1], ignore_errors=True)
    if record is None:
        raise UnknownRun("run", run_id, "its directory holds no run", f"Look at {run.path}")
    return record


def purge(home: Home, undo_days: float, now: float) -> int:
    """Remove for good what was thrown away long enough ago; how many bytes that freed."""
    freed = 0
    for bin_ in (home.path / "trash").glob("*.*"):
        since = bin_.name.rpartition(".")[2].partition("-")[0]
        if since.isdecimal() and now - int(since) >= undo_days * 86_400:
            freed += sum(path.lstat().st_size for path in bin_.rglob("*") if path.is_file())
            shutil.rmtree(bin_, ignore_errors=True)
    return freed


def shorten_log(log: Path, log_mb: int) -> int:
    """Of a long output keep the beginning and the end; how many bytes went."""
    try:
        size = log.stat().st_size
    except OSError:
        return 0
    if size <= log_mb << 20:
        return 0
    shorter = log.with_name(f".{log.name}.new")
    gone = size - 2 * _KEPT_BYTES
    with open(log, "rb") as source, open(shorter, "wb") as target:
        os.fchmod(target.fileno(), 0o600)
        target.write(source.read(_KEPT_BYTES))
        target.write(f"\n[... {gone} bytes were removed by the retention policy ...]\n".encode())
        source.seek(size - _KEPT_BYTES)
        shutil.copyfileobj(source, target)
    shorter.replace(log)
    return gone


def _verify(package: Path, directory: Path) -> None:
    """Read a package to its end and compare every file with the one it was made of."""
    seen = 0
    with tarfile.open(package, "r:gz") as tar:
        for member in tar:
            if not member.isfile():
                continue
            seen += 1
            packed = tar.extractfile(member)
            original = directory.parent / member.name
            if packed is None:
                raise ConfigError("archive", member.name, "cannot be read back", "The run was left as it is")
            with packed, open(original, "rb") as file:
                if _digest(packed) != _digest(file):
                    raise ConfigError("archive", member.name, "was packed wrongly", "The run was left as it is")
    here = sum(1 for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    if seen < here:
        raise ConfigError("archive", str(package), f"holds {seen} of {here} files", "The run was left as it is")


def _digest(file: object) -> bytes:
    digest = hashlib.sha256()
    while block := file.read(_BLOCK):  # type: ignore[attr-defined]
        digest.update(block)
    return digest.digest()


def _remove(home: Home, directory: Path) -> None:
    """Out of sight with one rename, so that nobody ever sees half a run."""
    doomed = home.runs / f".{directory.name}.gone"
    directory.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
