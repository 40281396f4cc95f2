"""Disk space of datasets: the limit, the check before one is made, and which ones to remove."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from palaestra.errors import ConfigError, DatasetError
from palaestra.experience.datasets.dataset import DatasetSummary, list_datasets
from palaestra.experience.datasets.episodes import ArrayLayout
from palaestra.experience.datasets.incomplete_downloads import list_downloads
from palaestra.processes.memory import format_bytes

LIMIT_VARIABLE = "PALAESTRA_DATASETS_MAX_SIZE"
"""Environment variable with the size that all datasets together may have, such as 50GB."""
EPISODE_BYTES = 4096
"""Bytes that HDF5 needs for the groups and headers of one episode; measured 2.1 kB with one observation array."""
_RESERVE_BYTES = 64_000_000
"""Left free on the disk for the journals and checkpoints of running trainers."""
_SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_AGE_UNITS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def free_bytes(root: Path) -> int:
    """Free bytes of the disk on which a directory is, or will be."""
    existing = next(place for place in (root, *root.parents) if place.is_dir())
    return shutil.disk_usage(existing).free


def estimate_bytes(layout: ArrayLayout, steps: int, episodes: int) -> int:
    """Bytes of a dataset on disk, rounded up."""
    last = sum(leaf.row_bytes for leaf in layout.observations)
    return steps * layout.step_bytes + episodes * (last + EPISODE_BYTES)


def read_size_limit() -> int | None:
    """Bytes that all datasets together may have; None without a limit."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    return parse_size(text, LIMIT_VARIABLE) if text else None


def check_disk(root: Path, needed: int, dataset_id: str, free: Callable[[Path], int] = free_bytes) -> None:
    """Raise `DatasetError` with the numbers if a dataset of this size exceeds the limit or the space on the disk."""
    limit = read_size_limit()
    if limit is not None:
        _check_limit(root, needed, dataset_id, limit)
    available = free(root)
    if needed + _RESERVE_BYTES <= available:
        return
    sizes = f"{format_bytes(needed)} on the disk of {root} and {format_bytes(_RESERVE_BYTES)} in reserve"
    reason = f"it needs about {sizes}, but {format_bytes(available)} are free"
    remedy = "Remove datasets with: palaestra datasets prune --max-size SIZE, or set PALAESTRA_HOME to another disk"
    raise DatasetError("dataset", dataset_id, reason, remedy)


def _check_limit(root: Path, needed: int, dataset_id: str, limit: int) -> None:
    used = sum(row.size_bytes for row in (*list_datasets(root), *list_downloads(root)))
    if used + needed <= limit:
        return
    reason = (
        f"it needs about {format_bytes(needed)} and the datasets in {root} take {format_bytes(used)}, together more "
        f"than {LIMIT_VARIABLE} allows ({format_bytes(limit)})"
    )
    remedy = f"raise {LIMIT_VARIABLE}"
    if needed < limit:
        # Rounded down, so that the dataset fits afterwards.
        left = (limit - needed) // 1000
        remedy = f"remove datasets with: palaestra datasets prune --max-size {left}kB, or {remedy}"
    raise DatasetError("dataset", dataset_id, reason, remedy[0].upper() + remedy[1:])


def parse_size(text: str, place: str) -> int:
    """Bytes of a size such as `5GB` or `750 MB`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)b?\s*", text.lower())
    if match is None:
        raise ConfigError(place, text, "is not a size", "Write for example 5GB or 750MB")
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


def parse_age(text: str, place: str) -> float:
    """Seconds of an age such as `30d` or `12h`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([mhdw])\s*", text.lower())
    if match is None:
        raise ConfigError(place, text, "is not an age", "Write for example 30d, 12h or 2w")
    return float(match[1]) * _AGE_UNITS[match[2]]


def select_expired(
    rows: Sequence[DatasetSummary],
    *,
    max_size: int | None = None,
    older_than: float | None = None,
    now: float,
    in_use: Collection[str] = (),
) -> list[DatasetSummary]:
    """The datasets to remove, least recently used first; never one in use.

    Those that were not used for `older_than` seconds, and as many more as it takes until the rest fits into `max_size`.
    """
    candidates = sorted((row for row in rows if row.dataset_id not in in_use), key=lambda row: row.last_used)
    expired = [row for row in candidates if older_than is not None and now - row.last_used > older_than]
    if max_size is None:
        return expired
    left = sum(row.size_bytes for row in rows) - sum(row.size_bytes for row in expired)
    for row in candidates:
        if left <= max_size:
            break
        if row not in expired:
            expired.append(row)
            left -= row.size_bytes
    return expired
