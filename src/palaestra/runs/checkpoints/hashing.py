"""Names for bytes: the SHA-256 of a checkpoint, whether it is a file or a directory, and whether it still holds.

A directory with a manifest of ours is named by that manifest, which names the hash of every file; any other directory
by its sorted lines of name, size and hash. Cheap to import: no torch, no numpy.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palaestra.files.checkpoint import MANIFEST, FileDigest, digest_file, manifest_files
from palaestra.runs.record import CheckpointRecord

__all__ = ["Verdict", "Verifier", "digest_path", "verify"]


@dataclass(frozen=True)
class Verdict:
    """Whether the bytes are what they were."""

    fits: bool
    problem: str
    """Why not; empty when they fit."""
    time: float

    @property
    def verified(self) -> float:
        """As `CheckpointRecord.verified` says it."""
        return self.time if self.fits else -self.time


def digest_path(path: Path) -> FileDigest:
    """The digest of a file or directory. `OSError` when it cannot be read, `ValueError` for a manifest that is none."""
    if not path.is_dir():
        return digest_file(path)
    manifest = path / MANIFEST
    if manifest.is_file():
        raw = manifest.read_bytes()
        size = len(raw) + sum(one.size_bytes for one in manifest_files(raw, path).values())
        return FileDigest(hashlib.sha256(raw).hexdigest(), size)
    lines, size = [], 0
    for inner in sorted(p for p in path.rglob("*") if p.is_file()):
        one = digest_file(inner)
        lines.append(f"{inner.relative_to(path).as_posix()} {one.size_bytes} {one.sha256}\n")
        size += one.size_bytes
    return FileDigest(hashlib.sha256("".join(lines).encode()).hexdigest(), size)


def verify(record: CheckpointRecord, clock: Callable[[], float] = time.time) -> Verdict:
    """Read every byte of a checkpoint and compare."""
    problem = _problem(Path(record.path), record.sha256)
    return Verdict(not problem, problem, clock())


class Verifier:
    """Verifies, and remembers what was verified as long as size, time of change and inode of every file stay."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._known: dict[str, tuple[str, tuple[Any, ...], Verdict]] = {}

    def verify(self, record: CheckpointRecord) -> Verdict:
        """The verdict, from memory if nothing was touched since."""
        prints = _prints(Path(record.path))
        known = self._known.get(record.path)
        if known is not None and prints and known[:2] == (record.sha256, prints):
            return known[2]
        verdict = verify(record, self._clock)
        self._known[record.path] = (record.sha256, prints, verdict)
        return verdict


def _prints(path: Path) -> tuple[Any, ...]:
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    try:
        facts = [(str(file), os.stat(file)) for file in files]
    except OSError:
        return ()
    return tuple((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in facts)


def _problem(path: Path, sha256: str) -> str:
    try:
        if digest_path(path).sha256 != sha256:
            return "its SHA-256 differs: it was changed or damaged"
        manifest = path / MANIFEST
        files = manifest_files(manifest.read_bytes(), path) if path.is_dir() and manifest.is_file() else {}
        for name, wanted in files.items():
            one = digest_file(path / name)
            if one.size_bytes != wanted.size_bytes:
                return f"{name} is truncated or added to ({one.size_bytes} of {wanted.size_bytes} bytes)"
            if one.sha256 != wanted.sha256:
                return f"{name} was changed or damaged: its SHA-256 differs"
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    except ValueError as error:
        return str(error)
    return ""
