"""Downloads that have not finished: `<root>/.downloads/<dataset_id>/`, with a lock file beside each directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from palaestra.errors import DatasetError
from palaestra.experience.datasets.dataset import DatasetSummary, remove_empty_directories
from palaestra.experience.datasets.manifest import check_dataset_id, measure_bytes

_DOWNLOADS = ".downloads"
_LOCK = ".lock"
_MAX_DEPTH = 8


def download_directory(root: Path, dataset_id: str) -> Path:
    """The directory in which the files of a dataset arrive."""
    return root / _DOWNLOADS / check_dataset_id(dataset_id)


def list_downloads(root: Path) -> list[DatasetSummary]:
    """The downloads that were interrupted or are in progress, sorted by id."""
    return [_summarize(root, dataset_id) for dataset_id in sorted(_iterate_ids(root / _DOWNLOADS))]


def is_downloading(root: Path, dataset_id: str) -> bool:
    """Whether a process downloads this dataset at the moment."""
    try:
        with _lock(download_directory(root, dataset_id), dataset_id):
            return False
    except FileNotFoundError:
        return False
    except DatasetError:
        return True


@contextmanager
def hold_download(root: Path, dataset_id: str) -> Iterator[Path]:
    """The directory of a download, which no other process uses in the block; `DatasetError` if one does.

    A directory that is empty when the block ends is removed.
    """
    place = download_directory(root, dataset_id)
    existing = next(parent for parent in place.parents if parent.exists())
    place.mkdir(parents=True, exist_ok=True)
    with _lock(place, dataset_id, os.O_CREAT):
        try:
            yield place
        finally:
            if not any(place.iterdir()):
                _lock_path(place).unlink(missing_ok=True)
                remove_empty_directories(place, root if existing.is_relative_to(root) else existing)


def delete_download(root: Path, dataset_id: str) -> None:
    """Delete what has arrived of a dataset; `DatasetError` if a process downloads it at the moment."""
    with hold_download(root, dataset_id) as place:
        for path in place.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _summarize(root: Path, dataset_id: str) -> DatasetSummary:
    place = download_directory(root, dataset_id)
    changed = 0.0
    for path in (place, *place.rglob("*")):
        with contextlib.suppress(OSError):
            changed = max(changed, path.lstat().st_mtime)
    problem = f"its download was interrupted; continue it with: palaestra datasets download {dataset_id}"
    if is_downloading(root, dataset_id):
        problem = "it is being downloaded"
    return DatasetSummary(
        dataset_id=dataset_id,
        path=str(place),
        state="incomplete",
        problem=problem,
        size_bytes=measure_bytes(place),
        created=changed,
        last_used=changed,
    )


def _iterate_ids(downloads: Path, namespace: str = "") -> Iterator[str]:
    try:
        names = {entry.name for entry in os.scandir(downloads / namespace) if not entry.is_symlink()}
    except OSError:
        return
    for name in names:
        dataset_id = f"{namespace}/{name}".lstrip("/")
        if name + _LOCK in names:
            with contextlib.suppress(DatasetError):
                yield check_dataset_id(dataset_id)
        elif namespace.count("/") < _MAX_DEPTH:
            yield from _iterate_ids(downloads, dataset_id)


def _lock_path(place: Path) -> Path:
    return place.with_name(place.name + _LOCK)


@contextmanager
def _lock(place: Path, dataset_id: str, flags: int = 0) -> Iterator[None]:
    """Allow one user of a directory at a time."""
    descriptor = os.open(_lock_path(place), os.O_RDWR | flags, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            remedy = "Wait until it has finished"
            raise DatasetError("dataset", dataset_id, "is being downloaded by another process", remedy) from None
        yield
    finally:
        os.close(descriptor)
