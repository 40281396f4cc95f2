"""Downloads go through Minari's own remotes; here a directory plays the remote, and there really is no network."""

import json
import shutil
from pathlib import Path

import pytest
from tests.experience.datasets.samples import make_dataset

from palaestra.errors import ConfigError, DatasetError, DownloadFailed
from palaestra.experience.datasets import find_dataset, list_datasets
from palaestra.experience.datasets.download import download_dataset

remotes = pytest.importorskip("minari.storage.remotes")
NAME = "count/up-v0"


class DirectoryRemote:
    """A remote of Minari that serves a directory and can break its connection."""

    failures = 0
    calls = ()

    def __init__(self, name, token=None):
        self._root = name

    def get_dataset_metadata(self, dataset_id):
        return json.loads(Path(self._root, dataset_id, "data", "metadata.json").read_text())

    def download_dataset(self, dataset_id, path):
        target = path / dataset_id / "data"
        type(self).calls.append(sorted(file.name for file in target.glob("*")) if target.exists() else [])
        target.mkdir(parents=True, exist_ok=True)
        source = f"{self._root}/{dataset_id}/data"
        shutil.copyfile(f"{source}/metadata.json", target / "metadata.json")
        if type(self).failures:
            type(self).failures -= 1
            raise ConnectionError("the connection was reset")
        shutil.copyfile(f"{source}/main_data.hdf5", target / "main_data.hdf5")


@pytest.fixture
def remote(tmp_path, monkeypatch):
    dataset = make_dataset(tmp_path / "remote")
    for name in ("manifest.json", "index.npy"):
        (dataset.path / name).unlink()
    monkeypatch.setitem(remotes._registry, "directory", lambda: DirectoryRemote)
    monkeypatch.setenv("MINARI_REMOTE", f"directory://{tmp_path}/remote")
    monkeypatch.setattr(DirectoryRemote, "failures", 0)
    monkeypatch.setattr(DirectoryRemote, "calls", [])
    return dataset.path


def test_a_download_is_checked_and_gets_a_manifest(tmp_path, remote):
    root = tmp_path / "root"
    dataset = download_dataset(root, NAME)
    assert dataset.load_transitions().observation[:, 0].tolist() == [0, 1, 2, 5, 6]
    assert dataset.about["imported"] == "download"
    assert [row.state for row in list_datasets(root)] == ["verified"]
    assert not (root / ".downloads").exists()


def test_a_broken_connection_is_tried_again_and_continues(tmp_path, remote):
    DirectoryRemote.failures = 2
    pauses = []
    download_dataset(tmp_path / "root", NAME, pauses.append)
    assert len(pauses) == 2
    assert DirectoryRemote.calls == [[], ["metadata.json"], ["metadata.json"]]


def test_what_arrived_before_the_last_failure_is_kept_for_the_next_attempt(tmp_path, remote):
    root = tmp_path / "root"
    DirectoryRemote.failures = 3
    with pytest.raises(DownloadFailed, match=r"ConnectionError: the connection was reset.*Check the network"):
        download_dataset(root, NAME, lambda seconds: None)
    assert list_datasets(root) == []
    download_dataset(root, NAME)
    assert DirectoryRemote.calls[-1] == ["metadata.json"]
    assert find_dataset(NAME, root).total_steps == 5


def test_a_damaged_download_never_appears_under_its_name(tmp_path, remote):
    main = remote / "data" / "main_data.hdf5"
    main.write_bytes(main.read_bytes()[:1000])
    with pytest.raises(DatasetError):
        download_dataset(tmp_path / "root", NAME)
    assert list_datasets(tmp_path / "root") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [({"minari_version": "7.1"}, "minari_version = '7.1'"), ({"data_format": "arrow"}, "not stored as HDF5")],
)
def test_a_version_that_cannot_be_read_is_refused_before_the_download(tmp_path, remote, change, message):
    metadata = remote / "data" / "metadata.json"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | change))
    with pytest.raises(DatasetError, match=message):
        download_dataset(tmp_path / "root", NAME)
    assert DirectoryRemote.calls == []


def test_a_full_disk_is_refused_before_the_download(tmp_path, remote, monkeypatch):
    monkeypatch.setattr(
        "palaestra.experience.datasets.cache.shutil.disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0)
    )
    with pytest.raises(DatasetError, match="0 B are free"):
        download_dataset(tmp_path / "root", NAME)
    assert DirectoryRemote.calls == []


def test_a_download_beyond_the_limit_is_refused_before_it_starts(tmp_path, remote, monkeypatch):
    metadata = remote / "data" / "metadata.json"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"dataset_size": 3.0}))
    monkeypatch.setenv("PALAESTRA_DATASETS_MAX_SIZE", "2MB")
    with pytest.raises(DatasetError, match=r"needs about 3.0 MB.*MAX_SIZE allows \(2.0 MB\)"):
        download_dataset(tmp_path / "root", NAME)
    assert DirectoryRemote.calls == []
    assert not (tmp_path / "root").exists()


def test_a_second_download_of_the_same_dataset_is_refused(tmp_path, remote, monkeypatch):
    inner = []

    def download_again(seconds):
        with pytest.raises(DatasetError, match="is being downloaded by another process") as refusal:
            download_dataset(tmp_path / "root", NAME)
        inner.append(refusal)

    DirectoryRemote.failures = 1
    download_dataset(tmp_path / "root", NAME, download_again)
    assert len(inner) == 1


def test_without_a_network_the_message_says_so_at_once(tmp_path, monkeypatch):
    """An address of the reserved domain `.invalid` never resolves, with or without a network."""
    for name in ("MINARI_REMOTE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    with pytest.raises(
        DownloadFailed, match=r"D4RL/door/human-v2 cannot be downloaded \(hub.invalid cannot be resolved"
    ):
        download_dataset(tmp_path / "root", "D4RL/door/human-v2")
    assert not (tmp_path / "root").exists()


def test_an_unknown_remote_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_REMOTE", "ftp://somewhere")
    with pytest.raises(ConfigError, match=r"MINARI_REMOTE = 'ftp://somewhere': is no remote of Minari"):
        download_dataset(tmp_path, NAME)


def test_a_name_that_the_remote_does_not_have_is_refused(tmp_path, remote, monkeypatch):
    class EntryNotFoundError(Exception):
        pass

    def refuse(self, dataset_id):
        raise EntryNotFoundError("404")

    monkeypatch.setattr(DirectoryRemote, "get_dataset_metadata", refuse)
    with pytest.raises(DatasetError, match="has none of this name"):
        download_dataset(tmp_path / "root", NAME)
