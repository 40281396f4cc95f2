"""Taking in a checkpoint from elsewhere: copied, looked at, hashed, and on record; the source is never touched.

What is looked at is the copy, so that nobody can exchange the file in between. Whatever goes wrong, nothing is left
behind, and nothing that a checkpoint brings is ever run.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from palaestra.errors import CheckpointError
from palaestra.files.atomic import read_json, sync, sync_tree, write_json
from palaestra.files.checkpoint import MANIFEST, digest_file, manifest_files
from palaestra.files.home import Home
from palaestra.runs.checkpoints.hashing import digest_path, verify
from palaestra.runs.checkpoints.own_checkpoint import OwnCheckpoint
from palaestra.runs.checkpoints.pickle_scan import SB3_WEIGHTS, scan
from palaestra.runs.checkpoints.signature import signature_of
from palaestra.runs.checkpoints.steps import CheckpointStep, step_in_file
from palaestra.runs.record import MAX_INTEGER, CheckpointRecord, fit_checkpoint
from palaestra.runs.spec import find_text_fault

__all__ = ["Provenance", "import_checkpoint", "imported", "keep_checkpoint", "separate_from_runs"]

PLACE = "checkpoint"
_TEXTS = frozenset({".json", ".txt", ".jinja", ".md", ".yaml"})
"""Files of a checkpoint directory that loaders read as text."""
_LONGEST_NAME = 200
_FICLONE = 0x40049409
_log = logging.getLogger(__name__)
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What the importer knows of a checkpoint that its bytes do not say."""

    agent_id: str = ""
    env_id: str = ""
    env_step: int | None = None
    env_signature: Mapping[str, Any] = field(default_factory=dict)

    def checked(self, agent: str = "agent_id", env: str = "env_id", step: str = "env_step") -> Provenance:
        """This, when it can be stored; `CheckpointError` names the place as whoever gave it knows it."""
        for place, text in ((agent, self.agent_id), (env, self.env_id)):
            fault = find_text_fault(text, _LONGEST_NAME)
            if fault:
                raise CheckpointError(place, text, fault, "Give a name on one line")
        if self.env_step is not None and not 0 <= self.env_step <= MAX_INTEGER:
            raise CheckpointError(step, self.env_step, "is no count of steps", f"Give 0 to {MAX_INTEGER}")
        return self


def import_checkpoint(
    home: Home,
    source: Path,
    known: Provenance | None = None,
    *,
    trusted: bool = False,
    clock: Callable[[], float] = time.time,
) -> CheckpointRecord:
    """Copy a checkpoint into the state directory. `CheckpointError` when it is refused; `trusted` allows addresses.

    One whose bytes are there already stays as it is; what is known of it is what was said last.
    """
    known = (known or Provenance()).checked()
    directory = home.checkpoints
    unfinished = _unfinished(directory)
    try:
        if "\0" in str(source):
            raise CheckpointError(PLACE, str(source), "is not a path", "Give the path of a file or directory")
        unfinished.mkdir(parents=True)
        is_directory = source.is_dir()
        copy = _copied_directory(source, unfinished) if is_directory else _copied_file(source, unfinished)
        own = OwnCheckpoint.read(copy) if is_directory else None
        form = "palaestra" if is_directory else _looked_at(source, copy)
        step = _step(copy, own, known)
        if form == "sb3_zip":
            copy = _weights_of_sb3(copy)
        if own is not None and own.addresses and not trusted:
            raise CheckpointError(
                PLACE, str(source), f"evaluating it would import {own.addresses[0]}, which its configuration names",
                "Import it with --trust if you know that code",
            )  # fmt: skip
        found = digest_path(copy)
        record = _record(copy, found.sha256, found.size_bytes, form, own, known, step, clock())
        return _known_better(directory, record, known) or _settled(directory, unfinished, copy, record)
    except OSError as error:
        where = "" if error.filename in (None, str(source)) else f"{error.filename}: "
        remedy = "Check the path" if isinstance(error, FileNotFoundError | NotADirectoryError) else ""
        raise CheckpointError(PLACE, str(source), f"{where}{error.strerror or error}", remedy) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def keep_checkpoint(
    home: Home, source: Path, sha256: str, known: Provenance, clock: Callable[[], float] = time.time
) -> CheckpointRecord:
    """A copy of a checkpoint of ours that outlives its run and changes to it. `CheckpointError` if it is damaged."""
    directory = home.checkpoints
    final, unfinished = directory / sha256[:16], _unfinished(directory)
    there = _read(final / "record.json")
    if there is not None and there.sha256 == sha256:
        with contextlib.suppress(OSError):
            _separate(Path(there.path))
        if verify(there).fits:
            return there
    try:
        copy = unfinished / "checkpoint"
        for name in [*manifest_files((source / MANIFEST).read_bytes(), source), MANIFEST]:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            _copied(source / name, copy / name)
        found, own = digest_path(copy), OwnCheckpoint.read(copy)
        step = _step(copy, own, known)
        record = _record(copy, sha256, found.size_bytes, "palaestra", own, known, step, clock())
        verdict = verify(record)
        if not verdict.fits:
            raise CheckpointError(PLACE, str(source), verdict.problem, "Use another checkpoint")
        shutil.rmtree(final, ignore_errors=True)
        return _settled(directory, unfinished, copy, record)
    except (OSError, ValueError) as error:
        raise CheckpointError(PLACE, str(source), f"cannot be kept ({error})", "Use another checkpoint") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def imported(home: Home) -> list[CheckpointRecord]:
    """Every checkpoint that was imported or kept, as its directory says."""
    notes = sorted(home.checkpoints.glob("*/record.json"))
    return [record for note in notes if (record := _read(note)) is not None]


def separate_from_runs(home: Home) -> list[str]:
    """Give kept checkpoints files of their own where an earlier version linked those of a run; the ids of these."""
    changed = []
    for record in imported(home):
        try:
            if _separate(Path(record.path)):
                changed.append(record.checkpoint_id)
        except OSError as error:
            _log.warning("%s: its files are still those of its run: %s", record.path, error)
    return changed


def _separate(path: Path) -> bool:
    """Replace every file that has a second name somewhere by a copy; whether there was one."""
    files = [inner for inner in path.rglob("*") if inner.is_file()] if path.is_dir() else [path]
    shared = [file for file in files if file.stat().st_nlink > 1]
    for file in shared:
        copy = file.with_name(f".{file.name}.{os.getpid()}.new")
        try:
            sync(_copied(file, copy))
            os.replace(copy, file)
        finally:
            copy.unlink(missing_ok=True)
    for directory in {file.parent for file in shared}:
        sync(directory)
    return bool(shared)


def _copied_file(source: Path, into: Path) -> Path:
    name = source.name if _SAFE_NAME.fullmatch(source.name) else f"weights{source.suffix}"
    if not _SAFE_NAME.fullmatch(name) or name == "record.json":
        name = "weights"
    return _copied(source, into / name)


def _copied_directory(source: Path, into: Path) -> Path:
    """A checkpoint of ours: what its manifest lists, and nothing else."""
    try:
        raw = (source / MANIFEST).read_bytes()
        files = manifest_files(raw, source)
    except FileNotFoundError:
        remedy = "Import one file, or a checkpoint directory of palaestra"
        raise CheckpointError(PLACE, str(source), "is a directory without a manifest", remedy) from None
    except ValueError as error:
        raise CheckpointError(PLACE, str(source), str(error), "Use another checkpoint") from None
    copy = into / "checkpoint"
    copy.mkdir()
    for name, wanted in files.items():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        _copied(source / name, target)
        if digest_file(target) != wanted:
            reason = f"{name} is truncated or damaged: its SHA-256 differs"
            raise CheckpointError(PLACE, str(source), reason, "Use another checkpoint")
        if target.suffix not in _TEXTS:
            report = scan(target)
            if not report.safe:
                raise CheckpointError(PLACE, f"{source}/{name}", report.reason, _remedy(report.format))
    (copy / MANIFEST).write_bytes(raw)
    if OwnCheckpoint.read(copy) is None:
        raise CheckpointError(PLACE, str(source), "its state cannot be read", "Use another checkpoint")
    return copy


def _copied(source: Path, target: Path) -> Path:
    # A pipe or device of that name must neither block nor fill the disk.
    descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as reading:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(PLACE, str(source), "is not a regular file", "Import a file of weights")
        with open(target, "xb") as writing:
            if not _clone_blocks(reading.fileno(), writing.fileno()):
                shutil.copyfileobj(reading, writing, 1 << 20)
    return target


def _clone_blocks(source: int, target: int) -> bool:
    """Share the blocks of a file until one of the two is written, on file systems that can (Btrfs, XFS)."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def _unfinished(directory: Path) -> Path:
    return directory / f".{os.getpid()}-{time.monotonic_ns()}.new"


def _looked_at(source: Path, copy: Path) -> str:
    report = scan(copy)
    if not report.safe:
        raise CheckpointError(PLACE, str(source), report.reason, _remedy(report.format))
    return report.format


def _remedy(form: str) -> str:
    if form == "unknown":
        return "Known are safetensors, what torch.save writes, zips of Stable-Baselines3 and checkpoints of palaestra"
    if form == "pickle":
        return "Save the weights as safetensors, or their state_dict with torch.save"
    return "Save the weights alone, as safetensors or as a state_dict"


def _weights_of_sb3(copy: Path) -> Path:
    """The weights out of a Stable-Baselines3 zip; what else is in it are pickled objects, which stay behind."""
    weights = copy.with_name(f"{copy.stem}.{SB3_WEIGHTS}")
    with zipfile.ZipFile(copy) as archive, archive.open(SB3_WEIGHTS) as reading, open(weights, "xb") as writing:
        shutil.copyfileobj(reading, writing, 1 << 20)
    copy.unlink()
    return weights


def _step(copy: Path, own: OwnCheckpoint | None, known: Provenance) -> CheckpointStep:
    if known.env_step is not None:
        return CheckpointStep(known.env_step, "given")
    return step_in_file(copy) if own is None else CheckpointStep(own.env_step, "file")


def _record(
    copy: Path,
    sha256: str,
    size: int,
    form: str,
    own: OwnCheckpoint | None,
    known: Provenance,
    step: CheckpointStep,
    now: float,
) -> CheckpointRecord:
    own = own or OwnCheckpoint()
    env_id = known.env_id or own.env_id
    agent = f"palaestra/{own.algorithm}" if own.algorithm else ""
    return fit_checkpoint(
        CheckpointRecord(
            checkpoint_id=sha256[:16],
            run_id="",
            agent_id=known.agent_id or agent,
            env_id=env_id,
            attempt=0,
            env_step=step.env_step,
            step_source=step.source,
            path=str(copy),
            sha256=sha256,
            size_bytes=size,
            format="torch_zip" if form == "sb3_zip" else form,
            created=now,
            metric=own.score,
            profile="managed",
            env_signature=signature_of({"env_id": env_id, **own.env_signature, **known.env_signature}),
            metrics_digest=own.digest(),
            verified=now,
        )
    )


def _known_better(directory: Path, record: CheckpointRecord, known: Provenance) -> CheckpointRecord | None:
    """The one with these bytes that is there already, with what is said of it now on its record; None without one."""
    note = directory / record.checkpoint_id / "record.json"
    there = _read(note)
    if there is None or there.sha256 != record.sha256 or not Path(there.path).exists():
        return None
    said: dict[str, Any] = {"agent_id": known.agent_id} if known.agent_id else {}
    if known.env_id:
        said |= {"env_id": known.env_id, "env_signature": record.env_signature}
    if known.env_step is not None:
        said |= {"env_step": known.env_step, "step_source": "given"}
    now = replace(there, **said)
    if now != there:
        write_json(note, {"schema": 1, **asdict(now)})
    return now


def _settled(directory: Path, unfinished: Path, copy: Path, record: CheckpointRecord) -> CheckpointRecord:
    """Moved to where it stays, with its record beside it."""
    final = directory / record.checkpoint_id
    settled = CheckpointRecord(**{**asdict(record), "path": str(final / copy.name)})
    write_json(unfinished / "record.json", {"schema": 1, **asdict(settled)})
    sync_tree(unfinished)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(unfinished, final)
    sync(directory)
    return settled


def _read(note: Path) -> CheckpointRecord | None:
    data = read_json(note)
    if data is None or data.pop("schema", 1) != 1:
        return None
    try:
        return fit_checkpoint(CheckpointRecord(**data))
    except (TypeError, ValueError):
        return None
