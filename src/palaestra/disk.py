"""What is on the disk, not merely on its way there."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection
from pathlib import Path

__all__ = ["sync", "sync_files"]

_FEW = 64
"""Files up to which one after the other is quicker than asking the whole file system."""


def sync(path: Path) -> None:
    """Have the disk hold a file's bytes, or a directory's names: a new one, or one that is gone."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(paths: Collection[Path], directory: Path) -> None:
    """Have the disk hold files of one directory and their names; files that are gone are left out.

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
