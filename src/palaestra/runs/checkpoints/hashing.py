"""SHA-256 digests of checkpoints, files or directories, and their verification.

A directory with a manifest is identified by the hash of that manifest, which lists the hash of every file; any other
directory by the hash of its sorted lines of name, size and hash. Imports neither torch nor NumPy.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from palaestra.files.checkpoint import MANIFEST, FileDigest, digest_file, manifest_files
from palaestra.runs.record import CheckpointRecord


@dataclass(frozen=True)
class Verdict:
    """Result of a verification."""

    fits: bool
    """The bytes have the recorded hash."""
    problem: str
    """Why not; empty when they do."""
    time: float

    @property
    def verified_time(self) -> float:
        """Value for `CheckpointRecord.verified`: the time, negative when damaged."""
        return self.time if self.fits else -self.time


def digest_path(path: Path) -> FileDigest:
    """Compute the digest of a file or directory. Raises `OSError`, or `ValueError` for an invalid manifest."""
    if not path.is_dir():
        return digest_file(path)
    manifest = path / MANIFEST
    if manifest.is_file():
        raw = manifest.read_bytes()
        size = len(raw) + sum(file.size_bytes for file in manifest_files(raw, path).values())
        return FileDigest(hashlib.sha256(raw).hexdigest(), size)
    lines, size = [], 0
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        digest = digest_file(file)
        lines.append(f"{file.relative_to(path).as_posix()} {digest.size_bytes} {digest.sha256}\n")
        size += digest.size_bytes
    return FileDigest(hashlib.sha256("".join(lines).encode()).hexdigest(), size)


def verify(record: CheckpointRecord, clock: Callable[[], float] = time.time) -> Verdict:
    """Read every byte of a checkpoint and compare the hashes."""
    problem = _find_problem(Path(record.path), record.sha256)
    return Verdict(not problem, problem, clock())


def _find_problem(path: Path, sha256: str) -> str:
    try:
        if digest_path(path).sha256 != sha256:
            return "its SHA-256 differs: it was changed or damaged"
        manifest = path / MANIFEST
        files = manifest_files(manifest.read_bytes(), path) if manifest.is_file() else {}
        for name, expected in files.items():
            digest = digest_file(path / name)
            if digest.size_bytes != expected.size_bytes:
                problem = "is truncated" if digest.size_bytes < expected.size_bytes else "is too long"
                return f"{name} {problem} ({digest.size_bytes} of {expected.size_bytes} bytes)"
            if digest.sha256 != expected.sha256:
                return f"{name} was changed or damaged: its SHA-256 differs"
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    except ValueError as error:
        return str(error)
    return ""
