"""The package of an archived run: one tar file, checked before the directory is removed.

Directories and regular files are in the package. Symbolic links are recorded beside it and never followed, because
extraction refuses links that lead outside. Pipes, sockets and devices hold no data; they are left out, and listed.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO

from palaestra.errors import ConfigError
from palaestra.runs.wire import JsonObject

PACKAGE_ERRORS = (OSError, EOFError, ValueError, zlib.error, tarfile.TarError)
"""What reading a damaged or malicious package can raise."""


@dataclass(frozen=True)
class DirectoryContents:
    """The contents of a directory, by relative path."""

    directories: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    """Target of each symbolic link, as stored in the link."""
    left_out: list[str] = field(default_factory=list)
    """Pipes, sockets and devices."""


def list_contents(directory: Path) -> DirectoryContents:
    """Everything below a directory. `OSError` when something cannot be listed."""
    contents = DirectoryContents()
    _add_contents(directory, "", contents)
    return contents


def directory_size(directory: Path) -> int:
    """Size in bytes of all files below a directory; files that disappear meanwhile are skipped."""
    total = 0
    for base, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(base, name)).st_size
            except OSError:
                continue
    return total


def write_package(package: Path, directory: Path) -> DirectoryContents:
    """Pack a directory under its own name."""
    contents = list_contents(directory)
    with tarfile.open(package, "w:gz", compresslevel=6) as tar:
        for name in ["", *contents.directories, *contents.files]:
            path = directory / name
            member = tar.gettarinfo(path, arcname=f"{directory.name}/{name}".rstrip("/"))
            if member.isdir():
                tar.addfile(member)
                continue
            # A second hard link is stored as a file, so that each file can be extracted alone.
            member.type, member.linkname = tarfile.REGTYPE, ""
            with open(path, "rb") as file:
                member.size = os.fstat(file.fileno()).st_size
                tar.addfile(member, file)
    return contents


def verify_package(package: Path, directory: Path) -> None:
    """Check that extraction would restore the directory. `ConfigError` when it would not."""
    remedy = "The run was not changed"
    missing, packed = _compare(directory, package)
    if missing:
        raise ConfigError("archive", missing, "was packed wrongly", remedy)
    files = list_contents(directory).files
    if not packed.issuperset(f"{directory.name}/{name}" for name in files):
        raise ConfigError("archive", str(package), f"holds {len(packed)} of {len(files)} files", remedy)


def find_missing(directory: Path, package: Path, links: Mapping[str, str]) -> str:
    """The first file or link of a package that a directory lacks or holds differently; empty when there is none."""
    missing, _ = _compare(directory, package)
    if missing:
        return missing
    for name, target in links.items():
        if not (directory / name).is_symlink() or os.readlink(directory / name) != target:
            return f"{directory.name}/{name}"
    return ""


def extract_package(package: Path, into: Path, name: str, links: Mapping[str, str]) -> Path:
    """Extract the package of the run `name` and create its links; the path of the run. Raises `PACKAGE_ERRORS`."""
    all_links = dict(links)

    def select_members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
        for member in tar:
            if member.isdir() or member.isfile() or member.islnk():
                yield member
            elif member.issym():
                # Packages of earlier versions hold symbolic links, including those that lead outside.
                all_links.setdefault(str(PurePosixPath(member.name).relative_to(name)), member.linkname)

    with tarfile.open(package, "r:gz") as tar:
        tar.extractall(into, members=select_members(tar), filter="data")
    run = into / name
    for path, target in all_links.items():
        link = run / path
        # Nothing is created through a link, even if the note beside the package says so.
        if not link.parent.resolve().is_relative_to(run.resolve()):
            raise tarfile.OutsideDestinationError(tarfile.TarInfo(path), str(link.parent.resolve()))
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    return run


def read_links(note: JsonObject | None) -> dict[str, str]:
    """The symbolic links in the note beside a package."""
    links = (note or {}).get("links")
    return {str(path): str(target) for path, target in links.items()} if isinstance(links, dict) else {}


def _add_contents(directory: Path, prefix: str, contents: DirectoryContents) -> None:
    with os.scandir(directory) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        name = prefix + entry.name
        if entry.is_symlink():
            contents.links[name] = os.readlink(entry.path)
        elif entry.is_dir(follow_symlinks=False):
            contents.directories.append(name)
            _add_contents(Path(entry.path), f"{name}/", contents)
        elif entry.is_file(follow_symlinks=False):
            contents.files.append(name)
        else:
            contents.left_out.append(name)


def _compare(directory: Path, package: Path) -> tuple[str, set[str]]:
    """The first file of a package that the directory lacks or holds differently, and the files read until then.

    Reads the package to its end, as extraction would.
    """
    packed: set[str] = set()
    with tarfile.open(package, "r:gz") as tar:
        for member in tar:
            if not member.isfile():
                continue
            tarfile.data_filter(member, str(directory.parent))
            packed.add(member.name)
            content, path = tar.extractfile(member), directory.parent / member.name
            if content is None or not _is_regular_file(path):
                return member.name, packed
            with content, open(path, "rb") as file:
                if _digest(content) != _digest(file):
                    return member.name, packed
    return "", packed


def _is_regular_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _digest(file: IO[bytes]) -> bytes:
    return hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]
