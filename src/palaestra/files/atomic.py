"""Files and directories that appear whole or not at all, and lines that are appended with one write.

Everything is written under a temporary name, `.{name}.{pid}.tmp`, and renamed. `kill -9` loses nothing that returned;
a power cut loses nothing that was written with `durable`.
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

__all__ = [
    "append_line",
    "new_directory",
    "new_file",
    "read_json",
    "remove_leftovers",
    "sync",
    "sync_files",
    "sync_tree",
    "write_bytes",
    "write_json",
    "write_text",
]

_FEW = 64
"""Files up to which one after the other is quicker than asking the whole file system."""


@contextmanager
def new_file(path: Path, *, mode: int = 0o644, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file under a temporary name; it replaces `path` when the block ends and is removed if it raises."""
    temporary = _temporary(path)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        # A disk that is full stays full as long as half a file lies on it.
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


@contextmanager
def new_directory(path: Path, *, mode: int = 0o777, durable: bool = True) -> Iterator[Path]:
    """Make a directory under a temporary name; it becomes `path` when the block ends, and is removed if it raises.

    `path` must not exist, or be an empty directory; its parents are made.
    """
    temporary = _temporary(path)
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
    """Replace a file."""
    with new_file(path, mode=mode, durable=durable) as file:
        file.write(data)


def write_text(path: Path, text: str, *, mode: int = 0o644, durable: bool = True) -> None:
    """Replace a text file."""
    write_bytes(path, text.encode(), mode=mode, durable=durable)


def write_json(path: Path, data: Mapping[str, Any], *, mode: int = 0o644, durable: bool = True) -> None:
    """Replace a JSON document."""
    write_text(path, dump_json(data, indent=2, default=str) + "\n", mode=mode, durable=durable)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None when there is no file, or no object in it."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def append_line(path: Path, data: Mapping[str, Any], *, durable: bool = False) -> None:
    """Add one JSON line with one write; a line that a crash tore before is ended first."""
    line = dump_json(data, separators=(",", ":"), default=str).encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        written = os.write(descriptor, line)
        if written != len(line):
            raise OSError(f"{path}: only {written} of {len(line)} bytes fitted")
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Wait until the disk holds a file's bytes, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a directory; there is nothing better to do on them.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def sync_files(paths: Collection[Path], directory: Path) -> None:
    """Wait until the disk holds files of one directory and their names; files that are gone are left out.

    Each `fsync` waits for the disk by itself: two thousand small files take twenty seconds one by one, and a fraction
    of a second when the file system is asked once.
    """
    if len(paths) > _FEW and _sync_file_system(directory):
        return
    for path in (*paths, directory):
        try:
            sync(path)
        except FileNotFoundError:
            continue


def sync_tree(directory: Path) -> None:
    """Wait until the disk holds everything below a directory. Links are not followed; pipes are left out."""
    paths: list[Path] = []
    for base, directories, names in os.walk(directory):
        files = [Path(base, name) for name in names]
        paths += [path for path in files if path.is_file() and not path.is_symlink()]
        paths += [Path(base, name) for name in directories if not os.path.islink(os.path.join(base, name))]
    sync_files(paths, directory)


def remove_leftovers(directory: Path) -> None:
    """Remove what processes that were killed left under temporary names in a directory."""
    for path in directory.glob(".*.tmp"):
        pid = path.name.removesuffix(".tmp").rpartition(".")[2]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _sync_file_system(directory: Path) -> bool:
    """Whether the file system of a directory could be synced as a whole."""
    try:
        syncfs = ctypes.CDLL(None, use_errno=True).syncfs
    except AttributeError:
        return False
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        return bool(syncfs(descriptor) == 0)
    finally:
        os.close(descriptor)
