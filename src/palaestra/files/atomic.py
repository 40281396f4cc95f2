"""Atomic writing of files and directories, and appending of lines.

Data is written under a temporary name, `.{name}.{pid}.tmp`, and renamed. After a call returns, `kill -9` loses nothing;
with `durable`, neither does a power failure.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from palaestra.strict_json import dump_json

_MAX_SINGLE_SYNCS = 64
"""Up to this many files, syncing each one is faster than syncing the file system."""


@contextmanager
def atomic_file(path: Path, *, mode: int = 0o644, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file under a temporary name; it replaces `path` when the block ends and is removed if it raises."""
    temporary = _temporary_path(path)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        # Free the space at once, in case the disk is full.
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


@contextmanager
def atomic_directory(path: Path, *, mode: int = 0o777, durable: bool = True) -> Iterator[Path]:
    """Create a directory under a temporary name; it becomes `path` when the block ends and is removed if it raises.

    `path` must not exist or be an empty directory; its parents are created.
    """
    temporary = _temporary_path(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode, parents=True)
    try:
        yield temporary
        if durable:
            sync_tree(temporary)
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if durable:
        sync(path.parent)


def write_bytes(path: Path, data: bytes, *, mode: int = 0o644, durable: bool = True) -> None:
    """Write a file atomically."""
    with atomic_file(path, mode=mode, durable=durable) as file:
        file.write(data)


def write_text(path: Path, text: str, *, mode: int = 0o644, durable: bool = True) -> None:
    """Write a text file atomically."""
    write_bytes(path, text.encode(), mode=mode, durable=durable)


def write_json(path: Path, data: Mapping[str, Any], *, mode: int = 0o644, durable: bool = True) -> None:
    """Write a JSON file atomically."""
    write_text(path, dump_json(data, indent=2, default=str) + "\n", mode=mode, durable=durable)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if the file is missing or not a JSON object."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def append_line(path: Path, data: Mapping[str, Any], *, durable: bool = False) -> None:
    """Append one JSON line with one write, after ending a line that a crash left incomplete."""
    line = dump_json(data, separators=(",", ":"), default=str).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        written = os.write(descriptor, line)
        if written != len(line):
            raise OSError(f"{path}: only {written} of {len(line)} bytes were written")
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a directory.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def sync_files(paths: Collection[Path], directory: Path) -> None:
    """Wait until files of one directory and their names are on disk; missing files are skipped.

    Two thousand small files take twenty seconds with `fsync`, and a fraction of a second if the file system is synced.
    """
    if len(paths) > _MAX_SINGLE_SYNCS and _sync_file_system(directory):
        return
    for path in (*paths, directory):
        try:
            sync(path)
        except FileNotFoundError:
            continue


def sync_tree(directory: Path) -> None:
    """Wait until everything below a directory is on disk. Symbolic links and special files are skipped."""
    paths: list[Path] = []
    for base, directories, names in os.walk(directory):
        files = [Path(base, name) for name in names]
        paths += [path for path in files if path.is_file() and not path.is_symlink()]
        paths += [Path(base, name) for name in directories if not os.path.islink(os.path.join(base, name))]
    sync_files(paths, directory)


def remove_stale_files(directory: Path) -> None:
    """Remove the temporary files that killed processes left in a directory."""
    for path in directory.glob(".*.tmp"):
        pid = path.name.removesuffix(".tmp").rpartition(".")[2]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)


def _temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _sync_file_system(directory: Path) -> bool:
    """Sync the whole file system of a directory; False if that is impossible."""
    try:
        syncfs = ctypes.CDLL(None, use_errno=True).syncfs
    except AttributeError:
        return False
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        return bool(syncfs(descriptor) == 0)
    finally:
        os.close(descriptor)
