"""Imports checkpoints from other places: copies, scans, hashes and records them. The source is never changed.

The copy is scanned, so the file cannot be exchanged after the scan. A failed import leaves nothing behind, and code in
a checkpoint is never run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import stat
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from palaestra.errors import CheckpointError
from palaestra.files.atomic import sync, sync_tree, write_json
from palaestra.files.checkpoint import MANIFEST, FileDigest, digest_file, manifest_files
from palaestra.files.home import Home
from palaestra.runs.checkpoints.files import CheckpointStep, PalaestraCheckpoint, digest_path, summarize_returns, verify
from palaestra.runs.checkpoints.pickle_scan import SB3_WEIGHTS, scan
from palaestra.runs.checkpoints.sb3_zip import Sb3Zip, find_statistics, strip_objects
from palaestra.runs.checkpoints.signature import normalize_signature
from palaestra.runs.record import MAX_INTEGER, CheckpointRecord, fit_checkpoint
from palaestra.runs.spec import find_text_fault
from palaestra.runs.store.rebuild import list_imported, read_imported
from palaestra.runs.wire import JsonObject

_PLACE = "checkpoint"
_TEXT_SUFFIXES = frozenset({".json", ".txt", ".jinja", ".md", ".yaml"})
"""Files of a checkpoint directory that are read as text and need no scan."""
_MAX_NAME_LENGTH = 200
_FICLONE = 0x40049409
_log = logging.getLogger(__name__)
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What the user knows about a checkpoint that its files do not say."""

    agent_id: str = ""
    env_id: str = ""
    env_step: int | None = None
    env_signature: JsonObject = field(default_factory=dict)

    def validate(self, agent: str = "agent_id", env: str = "env_id", step: str = "env_step") -> Provenance:
        """Return this if it can be stored, else raise `CheckpointError`; the arguments name the fields in errors."""
        for place, text in ((agent, self.agent_id), (env, self.env_id)):
            fault = find_text_fault(text, _MAX_NAME_LENGTH)
            if fault:
                raise CheckpointError(place, text, fault, "Give a name on one line")
        if self.env_step is not None and not 0 <= self.env_step <= MAX_INTEGER:
            raise CheckpointError(step, self.env_step, "is not a number of steps", f"Give 0 to {MAX_INTEGER}")
        return self


def import_checkpoint(
    home: Home,
    source: Path,
    provenance: Provenance | None = None,
    *,
    trusted: bool = False,
    clock: Callable[[], float] = time.time,
) -> CheckpointRecord:
    """Copy a checkpoint into the state directory. Raises `CheckpointError` when it is refused.

    `trusted` allows a configuration that names code, and keeps the objects in a Stable-Baselines3 zip. If the same
    bytes were imported before, only their record is updated with the new provenance.
    """
    provenance = (provenance or Provenance()).validate()
    directory = home.checkpoints
    unfinished = _temporary_directory(directory)
    try:
        if "\0" in str(source):
            raise CheckpointError(_PLACE, str(source), "is not a path", "Give the path of a file or directory")
        unfinished.mkdir(parents=True)
        if source.is_dir():
            copy, form = _copy_directory(source, unfinished, is_untrusted=True), "palaestra"
        else:
            copy = _copy_file(source, unfinished)
            form = _require_safe(copy, str(source))
        own = PalaestraCheckpoint.read(copy)
        step = _find_step(copy, own, provenance)
        facts = provenance
        if form == "sb3_zip":
            agent_id = _read_sb3_zip(copy, str(source), strip=not trusted)
            facts = replace(provenance, agent_id=provenance.agent_id or agent_id)
            statistics = find_statistics(source)
            if statistics is not None:
                # A pickle that is read only after the user has agreed to it.
                _copy(statistics, unfinished / statistics.name)
        if own is not None and own.addresses and not trusted:
            reason = f"evaluating it would import {own.addresses[0]}, which its configuration names"
            raise CheckpointError(_PLACE, str(source), reason, "Import it with --trust if you know that code")
        record = _build_record(copy, digest_path(copy), form, own, facts, step, clock())
        existing = _update_existing(directory, record, provenance)
        return existing or _move_into_place(directory, unfinished, copy, record)
    except OSError as error:
        where = "" if error.filename in (None, str(source)) else f"{error.filename}: "
        remedy = "Check the path" if isinstance(error, FileNotFoundError | NotADirectoryError) else ""
        raise CheckpointError(_PLACE, str(source), f"{where}{error.strerror or error}", remedy) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def copy_out_of_run(
    home: Home, source: Path, sha256: str, provenance: Provenance, clock: Callable[[], float] = time.time
) -> CheckpointRecord:
    """Copy a Palaestra checkpoint out of its run. Raises `CheckpointError` when it is damaged."""
    directory = home.checkpoints
    final, unfinished = directory / sha256[:16], _temporary_directory(directory)
    existing = read_imported(final / "record.json")
    if existing is not None and existing.sha256 == sha256:
        with contextlib.suppress(OSError):
            _replace_hard_links(Path(existing.path))
        if verify(existing).fits:
            return existing
    try:
        unfinished.mkdir(parents=True)
        copy = _copy_directory(source, unfinished, is_untrusted=False)
        digest, own = digest_path(copy), PalaestraCheckpoint.read(copy)
        if digest.sha256 != sha256:
            reason = "its SHA-256 differs: it was changed or damaged"
            raise CheckpointError(_PLACE, str(source), reason, "Use another checkpoint")
        step = _find_step(copy, own, provenance)
        record = _build_record(copy, digest, "palaestra", own, provenance, step, clock())
        shutil.rmtree(final, ignore_errors=True)
        return _move_into_place(directory, unfinished, copy, record)
    except (OSError, ValueError) as error:
        raise CheckpointError(_PLACE, str(source), f"cannot be copied ({error})", "Use another checkpoint") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def detach_from_runs(home: Home) -> list[str]:
    """Copy the files of kept checkpoints that an earlier version hard-linked to those of a run; return their ids."""
    changed = []
    for record in list_imported(home):
        try:
            if _replace_hard_links(Path(record.path)):
                changed.append(record.checkpoint_id)
        except OSError as error:
            _log.warning("%s: the files are still shared with those of the run: %s", record.path, error)
    return changed


def _replace_hard_links(path: Path) -> bool:
    """Replace every file that has another hard link by a copy; return whether there was one."""
    files = [inner for inner in path.rglob("*") if inner.is_file()] if path.is_dir() else [path]
    shared = [file for file in files if file.stat().st_nlink > 1]
    for file in shared:
        copy = file.with_name(f".{file.name}.{os.getpid()}.new")
        try:
            sync(_copy(file, copy))
            os.replace(copy, file)
        finally:
            copy.unlink(missing_ok=True)
    for directory in {file.parent for file in shared}:
        sync(directory)
    return bool(shared)


def _copy_file(source: Path, into: Path) -> Path:
    name = source.name if _SAFE_NAME.fullmatch(source.name) else f"weights{source.suffix}"
    if not _SAFE_NAME.fullmatch(name) or name == "record.json":
        name = "weights"
    return _copy(source, into / name)


def _copy_directory(source: Path, into: Path, *, is_untrusted: bool) -> Path:
    """Copy the files that the manifest of a Palaestra checkpoint lists; scan those of an untrusted one."""
    try:
        raw = (source / MANIFEST).read_bytes()
        files = manifest_files(raw, source)
    except FileNotFoundError:
        if not is_untrusted:
            raise
        remedy = "Import a single file, or a checkpoint directory of palaestra"
        raise CheckpointError(_PLACE, str(source), "is a directory without a manifest", remedy) from None
    except ValueError as error:
        raise CheckpointError(_PLACE, str(source), str(error), "Use another checkpoint") from None
    copy = into / "checkpoint"
    copy.mkdir()
    for name, expected in files.items():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy(source / name, target)
        if digest_file(target) != expected:
            reason = f"{name} is truncated or damaged: its SHA-256 differs"
            raise CheckpointError(_PLACE, str(source), reason, "Use another checkpoint")
        if is_untrusted and target.suffix not in _TEXT_SUFFIXES:
            _require_safe(target, f"{source}/{name}")
    (copy / MANIFEST).write_bytes(raw)
    if is_untrusted and PalaestraCheckpoint.read(copy) is None:
        raise CheckpointError(_PLACE, str(source), "its state cannot be read", "Use another checkpoint")
    return copy


def _copy(source: Path, target: Path) -> Path:
    # Non-blocking, so that a pipe or device of that name cannot hang the import.
    descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as reading:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(_PLACE, str(source), "is not a regular file", "Import a file of weights")
        with open(target, "xb") as writing:
            if not _clone_blocks(reading.fileno(), writing.fileno()):
                shutil.copyfileobj(reading, writing, 1 << 20)
    return target


def _clone_blocks(source: int, target: int) -> bool:
    """Share the blocks of a file copy-on-write if the file system can (Btrfs, XFS); return whether it did."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def _temporary_directory(directory: Path) -> Path:
    return directory / f".{os.getpid()}-{time.monotonic_ns()}.new"


def _require_safe(copy: Path, source: str) -> str:
    """Scan a file and return its format. Raises `CheckpointError` when it may contain code."""
    report = scan(copy)
    if not report.safe:
        remedies = {
            "unknown": "Supported are safetensors, torch.save files, Stable-Baselines3 zips and palaestra checkpoints",
            "pickle": "Save the weights as safetensors, or their state_dict with torch.save",
        }
        remedy = remedies.get(report.format, "Save the weights alone, as safetensors or as a state_dict")
        raise CheckpointError(_PLACE, source, report.reason, remedy)
    return report.format


def _read_sb3_zip(copy: Path, source: str, *, strip: bool) -> str:
    """Return the agent id of a Stable-Baselines3 zip; `strip` replaces it by one with only weights and plain JSON."""
    try:
        described = Sb3Zip(str(copy))
    except ValueError as error:
        raise CheckpointError(_PLACE, source, str(error), "Use another checkpoint") from None
    if strip:
        _strip_objects(copy, described)
    return f"sb3/{described.algorithm}" if described.algorithm else ""


def _strip_objects(copy: Path, described: Sb3Zip) -> None:
    stripped, part = copy.with_name(".stripped"), copy.with_name(".part")
    with zipfile.ZipFile(copy) as archive, zipfile.ZipFile(stripped, "x") as target:
        # A fixed date, so that the same zip gives the same bytes each time.
        target.writestr(zipfile.ZipInfo("data"), json.dumps(strip_objects(described.data)))
        for name in sorted(archive.namelist()):
            if name.endswith(".pth"):
                with archive.open(name) as reading, open(part, "wb") as writing:
                    shutil.copyfileobj(reading, writing, 1 << 20)
                if name == SB3_WEIGHTS or scan(part).safe:
                    target.writestr(zipfile.ZipInfo(name), part.read_bytes())
    part.unlink()
    os.replace(stripped, copy)


def _find_step(copy: Path, own: PalaestraCheckpoint | None, provenance: Provenance) -> CheckpointStep:
    if provenance.env_step is not None:
        return CheckpointStep(provenance.env_step, "given")
    return CheckpointStep.from_file(copy) if own is None else CheckpointStep(own.env_step, "file")


def _build_record(
    copy: Path,
    digest: FileDigest,
    form: str,
    own: PalaestraCheckpoint | None,
    provenance: Provenance,
    step: CheckpointStep,
    now: float,
) -> CheckpointRecord:
    own = own or PalaestraCheckpoint()
    env_id = provenance.env_id or own.env_id
    agent_id = f"palaestra/{own.algorithm}" if own.algorithm else ""
    return fit_checkpoint(
        CheckpointRecord(
            checkpoint_id=digest.sha256[:16],
            run_id="",
            agent_id=provenance.agent_id or agent_id,
            env_id=env_id,
            attempt=0,
            env_step=step.env_step,
            step_source=step.source,
            path=str(copy),
            sha256=digest.sha256,
            size_bytes=digest.size_bytes,
            format=form,
            created=now,
            metric=own.score,
            profile="managed",
            env_signature=normalize_signature({"env_id": env_id, **own.env_signature, **provenance.env_signature}),
            metrics_digest=summarize_returns(own.returns),
            offline_dataset=own.offline_dataset,
            verified=now,
        )
    )


def _update_existing(directory: Path, record: CheckpointRecord, provenance: Provenance) -> CheckpointRecord | None:
    """Update the record of an import with the same bytes from the new provenance; None when there is none."""
    file = directory / record.checkpoint_id / "record.json"
    existing = read_imported(file)
    if existing is None or existing.sha256 != record.sha256 or not Path(existing.path).exists():
        return None
    changes: JsonObject = {"agent_id": provenance.agent_id} if provenance.agent_id else {}
    if provenance.env_id:
        changes |= {"env_id": provenance.env_id, "env_signature": record.env_signature}
    if provenance.env_step is not None:
        changes |= {"env_step": provenance.env_step, "step_source": "given"}
    # Records of an earlier version have no dataset.
    updated = replace(existing, offline_dataset=record.offline_dataset or existing.offline_dataset, **changes)
    if updated != existing:
        write_json(file, {"schema": 1, **asdict(updated)})
    return updated


def _move_into_place(directory: Path, unfinished: Path, copy: Path, record: CheckpointRecord) -> CheckpointRecord:
    """Move a finished copy and its record to their final directory."""
    final = directory / record.checkpoint_id
    moved = replace(record, path=str(final / copy.name))
    write_json(unfinished / "record.json", {"schema": 1, **asdict(moved)})
    sync_tree(unfinished)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(unfinished, final)
    sync(directory)
    return moved
