"""Code that is sent to another machine: our own package, and the files of the user's project. By content, once.

A snapshot is named after the SHA-256 of its files, so that the same code is uploaded once per machine, and a run keeps
the code that it was started with.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import tarfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import palaestra
from palaestra.errors import ConfigError
from palaestra.runs.spec import RunSpec

PACKAGE_ROOT = Path(palaestra.__file__).parents[1]
"""The directory from which `palaestra` is imported here."""
_MAX_MB = 500
_GIT_TIMEOUT_S = 60.0
_STATE = "var/training/"


@dataclass(frozen=True)
class CodeSnapshot:
    """Files below a directory."""

    root: Path
    names: tuple[str, ...]
    """Paths relative to the directory, sorted."""
    about: str
    """What it holds, for messages."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of names, modes and contents."""
        total = hashlib.sha256()
        for name in self.names:
            path = self.root / name
            if path.is_symlink():
                total.update(f"{name}\0link\0{os.readlink(path)}\0".encode(errors="surrogateescape"))
                continue
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{name}\0{path.stat().st_mode & 0o100}\0{content}\0".encode(errors="surrogateescape"))
        return total.hexdigest()

    def pack(self) -> bytes:
        """A tar.gz of the files; the same bytes for the same files."""
        raw = io.BytesIO()
        with (
            gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=1, mtime=0) as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for name in self.names:
                information = archive.gettarinfo(str(self.root / name), arcname=name)
                information.uid = information.gid = information.mtime = 0
                information.uname = information.gname = ""
                if information.isreg():
                    with open(self.root / name, "rb") as file:
                        archive.addfile(information, file)
                elif information.issym():
                    archive.addfile(information)
        return raw.getvalue()

    def size(self) -> int:
        """Bytes of all files."""
        return sum((self.root / name).lstat().st_size for name in self.names)


def package_snapshot() -> CodeSnapshot:
    """Our own package as it is imported here."""
    root = PACKAGE_ROOT / "palaestra"
    names = sorted(
        str(path.relative_to(PACKAGE_ROOT))
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    )
    return CodeSnapshot(PACKAGE_ROOT, tuple(names), "the package palaestra")


def project_snapshot(spec: RunSpec) -> CodeSnapshot | None:
    """The user's files: those git knows in the checkout or working directory, else the given script; None without any.

    `ConfigError` if they are too large to be sent.
    """
    root = _project_root(spec)
    names = _list_git_files(root)
    about = f"the files of {root} that git does not ignore"
    if names is None:
        script = None if spec.script is None else spec.invoked_from / spec.script
        if script is None or not script.is_file() or not script.resolve().is_relative_to(root.resolve()):
            return None
        names, about = [os.path.relpath(script, root)], f"{script}"
    snapshot = CodeSnapshot(root, tuple(sorted(names)), about)
    megabytes = snapshot.size() >> 20
    if megabytes > _MAX_MB:
        reason = f"its files are {megabytes:,} MB, and at most {_MAX_MB} MB are sent to another machine"
        raise ConfigError("working directory", str(root), reason, "Exclude data with .gitignore")
    return snapshot


def _project_root(spec: RunSpec) -> Path:
    checkout = spec.config.get("checkout") or spec.checkout
    return (spec.invoked_from / Path(checkout).expanduser()) if isinstance(checkout, str) else spec.invoked_from


def _list_git_files(root: Path) -> list[str] | None:
    """Tracked files and new ones that are not ignored, below a directory; None outside a git working tree."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_TIMEOUT_S, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    names = {os.fsdecode(name) for name in done.stdout.split(b"\0") if name}
    # Files that git knows may have been removed, a submodule is a directory, and our own runs are not the project.
    kept = (name for name in names if not name.startswith(_STATE))
    return [name for name in kept if (root / name).is_symlink() or (root / name).is_file()]
