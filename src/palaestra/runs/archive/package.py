"""One run as one file: what a package holds, that it can be unpacked, and whether a directory holds all of it.

Directories and files are in the package. Links are beside it, because unpacking makes none that lead elsewhere; they
are never followed. Pipes, sockets and devices hold nothing and are left out, by name.
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
from typing import IO, Any

from palaestra.errors import ConfigError

__all__ = [
    "UNREADABLE",
    "Contents",
    "contents_of",
    "links_beside",
    "missing_from",
    "read_back",
    "unpack_into",
    "write",
]

UNREADABLE = (OSError, EOFError, ValueError, zlib.error, tarfile.TarError)
"""What reading a package that is damaged, or was made to do harm, can raise."""
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Contents:
    """What lies in a directory, by paths relative to it."""

    directories: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    """Where each points, as it is written in the link."""
    left_out: list[str] = field(default_factory=list)
    """Pipes, sockets and devices."""

    def note(self) -> dict[str, Any]:
        """What is written beside a package: the things that are not in it."""
        return {"links": self.links, "left_out": self.left_out}


def contents_of(directory: Path) -> Contents:
    """Everything below a directory. `OSError` when something cannot be listed."""
    found = Contents()
    _look(directory, "", found)
    return found


def write(package: Path, directory: Path) -> Contents:
    """Pack a directory under its own name."""
    found = contents_of(directory)
    with tarfile.open(package, "w:gz", compresslevel=6) as tar:
        for name in ["", *found.directories, *found.files]:
            path = directory / name
            member = tar.gettarinfo(path, arcname=f"{directory.name}/{name}".rstrip("/"))
            if member.isdir():
                tar.addfile(member)
                continue
            # A second name of the same file is a file of its own, so that each can be unpacked alone.
            member.type, member.linkname = tarfile.REGTYPE, ""
            with open(path, "rb") as file:
                member.size = os.fstat(file.fileno()).st_size
                tar.addfile(member, file)
    return found


def read_back(package: Path, directory: Path) -> None:
    """Make sure that unpacking would give the directory again. `ConfigError` when it would not."""
    left, packed = "The run was left as it is", set[str]()
    wrong = _first_missing(directory, package, packed)
    if wrong:
        raise ConfigError("archive", wrong, "was packed wrongly", left)
    here = contents_of(directory).files
    if not packed.issuperset(f"{directory.name}/{name}" for name in here):
        raise ConfigError("archive", str(package), f"holds {len(packed)} of {len(here)} files", left)


def missing_from(directory: Path, package: Path, links: Mapping[str, str]) -> str:
    """The first file or link of a package that a directory does not hold as it was packed; empty when it holds all."""
    missing = _first_missing(directory, package, set())
    if missing:
        return missing
    for name, target in links.items():
        if not (directory / name).is_symlink() or os.readlink(directory / name) != target:
            return f"{directory.name}/{name}"
    return ""


def unpack_into(directory: Path, package: Path, name: str, links: Mapping[str, str]) -> Path:
    """Unpack below a directory, and make the links again; where it is now. Raises one of `UNREADABLE`."""
    found = dict(links)

    def plain(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
        for member in tar:
            if member.isdir() or member.isfile() or member.islnk():
                yield member
            elif member.issym():
                # Packages once held links, those that lead out included.
                found.setdefault(str(PurePosixPath(member.name).relative_to(name)), member.linkname)

    with tarfile.open(package, "r:gz") as tar:
        tar.extractall(directory, members=plain(tar), filter="data")
    made = directory / name
    for path, target in found.items():
        link = made / path
        # Nothing is made below a link, wherever the note beside a package says that it should be.
        if not link.parent.resolve().is_relative_to(made.resolve()):
            raise tarfile.OutsideDestinationError(tarfile.TarInfo(path), str(link.parent.resolve()))
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    return made


def links_beside(note: Mapping[str, Any] | None) -> dict[str, str]:
    """The links that are written down beside a package."""
    links = (note or {}).get("links")
    return {str(path): str(target) for path, target in links.items()} if isinstance(links, dict) else {}


def _look(directory: Path, below: str, found: Contents) -> None:
    with os.scandir(directory) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        name = below + entry.name
        if entry.is_symlink():
            found.links[name] = os.readlink(entry.path)
        elif entry.is_dir(follow_symlinks=False):
            found.directories.append(name)
            _look(Path(entry.path), f"{name}/", found)
        elif entry.is_file(follow_symlinks=False):
            found.files.append(name)
        else:
            found.left_out.append(name)


def _first_missing(directory: Path, package: Path, seen: set[str]) -> str:
    """Reads a package to its end, as unpacking would; the names of its files are added to `seen`."""
    with tarfile.open(package, "r:gz") as tar:
        for member in tar:
            if not member.isfile():
                continue
            tarfile.data_filter(member, str(directory.parent))
            seen.add(member.name)
            packed, here = tar.extractfile(member), directory.parent / member.name
            if packed is None or not _is_file(here):
                return member.name
            with packed, open(here, "rb") as file:
                if _digest(packed) != _digest(file):
                    return member.name
    return ""


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _digest(file: IO[bytes]) -> bytes:
    digest = hashlib.sha256()
    while block := file.read(_BLOCK):
        digest.update(block)
    return digest.digest()
