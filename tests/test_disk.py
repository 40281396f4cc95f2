"""What is on the disk."""

import os

import pytest

from palaestra.disk import sync_files


@pytest.fixture
def synced(monkeypatch):
    """The names that were synced one by one."""
    found = []
    real = os.fsync

    def fsync(descriptor):
        found.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def _files(directory, count):
    directory.mkdir()
    paths = [directory / f"{number}.pts" for number in range(count)]
    for path in paths:
        path.write_bytes(b"x")
    return paths


def test_a_few_files_are_synced_one_by_one_and_their_directory_last(tmp_path, synced):
    sync_files([*_files(tmp_path / "d", 2), tmp_path / "d" / "gone"], tmp_path / "d")
    assert synced == ["0.pts", "1.pts", "d"]


def test_many_files_are_synced_with_one_call(tmp_path, synced):
    sync_files(_files(tmp_path / "d", 100), tmp_path / "d")
    assert synced == []


def test_where_the_file_system_cannot_be_asked_they_are_synced_one_by_one(tmp_path, synced, monkeypatch):
    monkeypatch.setattr("palaestra.disk._sync_file_system", lambda _: False)
    sync_files(_files(tmp_path / "d", 100), tmp_path / "d")
    assert len(synced) == 101
