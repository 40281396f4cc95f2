"""The manifest of a dataset: SHA-256 and size of every file, because Minari itself checks nothing.

    <root>/<namespace>/<name>-v<N>/
        data/metadata.json       Minari: spaces, environment, numbers of episodes and steps, reference scores
        data/main_data.hdf5      Minari: one group per episode
        index.npy                where the arrays of each episode begin in main_data.hdf5 (datasets made here)
        manifest.json            schema, how the dataset was made, and the digest of every other file; written last

The manifest holds no times, so that the same data has the same manifest. Its own time of modification is the last use.
`<root>/.verified.json` remembers which files were verified, by size, times and inode, for listings.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palaestra.errors import DatasetError
from palaestra.files.atomic import read_json, write_json
from palaestra.files.checkpoint import FileDigest, digest_file, read_digests

SCHEMA = 1
MANIFEST, DATA, INDEX = "manifest.json", "data", "index.npy"
_VERIFIED = ".verified.json"
_PLACE = "dataset"
_AGAIN = "Create, import or download it again"
_MAX_ID = 120
_DATASET_ID = re.compile(r"(?:[A-Za-z0-9_-]+/)*[A-Za-z0-9_-]+-v\d{1,6}", re.ASCII)


@dataclass(frozen=True)
class Manifest:
    """The manifest of a dataset."""

    dataset_id: str
    env_id: str
    about: Mapping[str, Any]
    """How the dataset was made."""
    files: Mapping[str, FileDigest]
    sha256: str
    """Digest of the manifest itself, which identifies the data."""


def check_dataset_id(dataset_id: str, place: str = _PLACE) -> str:
    """The id, if it is one of Minari's that is safe as a path; otherwise `DatasetError`."""
    remedy = "Write [namespace/]name-vN with letters, digits, - and _, such as pendulum/medium-v0"
    if not _DATASET_ID.fullmatch(dataset_id):
        raise DatasetError(place, dataset_id, "is not a dataset id", remedy)
    if len(dataset_id) > _MAX_ID:
        raise DatasetError(place, dataset_id, f"is longer than {_MAX_ID} characters", remedy)
    if DATA in dataset_id.split("/"):
        # Minari takes every directory that holds one named `data` for a dataset.
        raise DatasetError(place, dataset_id, f"a part of it is {DATA!r}, which Minari reserves", remedy)
    return dataset_id


def write_manifest(directory: Path, dataset_id: str, env_id: str, about: Mapping[str, Any]) -> None:
    """Hash every file of a dataset and write its manifest."""
    names = list_files(directory)
    digests = {name: digest_file(directory / name) for name in names if name != MANIFEST}
    files = {name: {"bytes": digest.size_bytes, "sha256": digest.sha256} for name, digest in digests.items()}
    document = {"schema": SCHEMA, "dataset_id": dataset_id, "env_id": env_id, "about": dict(about), "files": files}
    write_json(directory / MANIFEST, document)


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a dataset, None if it has none; `DatasetError` if it is damaged or of a newer version."""
    path = directory / MANIFEST
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DatasetError(_PLACE, str(directory), f"its manifest cannot be read ({error.strerror})", _AGAIN) from None
    try:
        document = json.loads(raw)
        schema = document["schema"]
        if type(schema) is int and schema > SCHEMA:
            reason = f"its manifest has schema {schema}; this version reads up to {SCHEMA}"
            raise DatasetError(_PLACE, str(directory), reason, "Upgrade palaestra")
        if schema != SCHEMA:
            raise ValueError(f"schema {schema!r} does not exist")
        files = read_digests(raw)
        if f"{DATA}/metadata.json" not in files:
            raise ValueError("it does not list data/metadata.json")
        about = dict(document["about"])
        facts = str(document["dataset_id"]), str(document["env_id"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DatasetError(_PLACE, str(directory), f"its manifest is damaged ({error})", _AGAIN) from None
    return Manifest(*facts, about, files, hashlib.sha256(raw).hexdigest())


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Raise `DatasetError` if a file is missing, was added or has another size. Reads no data."""
    present = set(list_files(directory)) - {MANIFEST}
    for name, expected in manifest.files.items():
        if name not in present:
            raise DatasetError(_PLACE, str(directory), f"{name} is missing", _AGAIN)
        size = (directory / name).stat().st_size
        if size != expected.size_bytes:
            problem = "is truncated" if size < expected.size_bytes else "is too long"
            reason = f"{name} {problem} ({size:,} of {expected.size_bytes:,} bytes)"
            raise DatasetError(_PLACE, str(directory), reason, _AGAIN)
    if extra := sorted(present - set(manifest.files)):
        remedy = f"Remove it with: rm {shlex.quote(str(directory / extra[0]))}"
        raise DatasetError(_PLACE, str(directory), f"{extra[0]} is not in its manifest", remedy)


def check_digests(directory: Path, manifest: Manifest) -> None:
    """Raise `DatasetError` if any byte differs from the manifest. Reads every file."""
    check_sizes(directory, manifest)
    for name, expected in manifest.files.items():
        try:
            actual = digest_file(directory / name)
        except (OSError, ValueError) as error:
            raise DatasetError(_PLACE, str(directory), f"{name} cannot be read ({error})", _AGAIN) from None
        if actual.sha256 != expected.sha256:
            reason = f"{name} was changed after it was written (its SHA-256 differs)"
            raise DatasetError(_PLACE, str(directory), reason, _AGAIN)


def list_files(directory: Path) -> list[str]:
    """Names of all files below a directory, sorted; `DatasetError` for a symbolic link or a special file."""
    names = []
    for base, directories, files in os.walk(directory):
        for name in [*directories, *files]:
            path = Path(base, name)
            relative = path.relative_to(directory).as_posix()
            mode = path.lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                kind = "a symbolic link" if stat.S_ISLNK(mode) else "a special file"
                raise DatasetError(_PLACE, str(directory), f"{relative} is {kind}", "Replace it by a copy of the file")
            if stat.S_ISREG(mode):
                names.append(relative)
    return sorted(names)


def measure_bytes(directory: Path) -> int:
    """Bytes of the files below a directory, as far as they can be read."""
    size = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            size += path.lstat().st_size if path.is_file() else 0
    return size


def remember_verified(root: Path, directory: Path, manifest: Manifest) -> None:
    """Remember that the files of a dataset matched their digests. Without effect where nothing can be written."""
    with contextlib.suppress(OSError, DatasetError):
        known = read_json(root / _VERIFIED) or {}
        alive = {name: entry for name, entry in known.items() if (root / name / MANIFEST).exists()}
        signature = _signature(directory, manifest)
        if alive.get(manifest.dataset_id) != signature:
            write_json(root / _VERIFIED, {**alive, manifest.dataset_id: signature}, durable=False)


def was_verified(root: Path, directory: Path, manifest: Manifest) -> bool:
    """Whether the files are those that were verified, by size, times and inode."""
    with contextlib.suppress(OSError):
        return bool((read_json(root / _VERIFIED) or {}).get(manifest.dataset_id) == _signature(directory, manifest))
    return False


def _signature(directory: Path, manifest: Manifest) -> list[Any]:
    facts = [(directory / name).stat() for name in manifest.files]
    return [manifest.sha256, *([f.st_size, f.st_mtime_ns, f.st_ctime_ns, f.st_ino] for f in facts)]
