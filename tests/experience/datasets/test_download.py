"""Downloads go through Minari's own remotes; here a directory plays the remote, and there really is no network."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.experience.datasets.samples import count_up, make_dataset

from palaestra.errors import ConfigError, DatasetError, DownloadFailed
from palaestra.experience.datasets import find_dataset, list_datasets
from palaestra.experience.datasets.download import download_dataset
from palaestra.experience.datasets.incomplete_downloads import hold_download, list_downloads
from palaestra.experience.datasets.scores import MissingScores

remotes = pytest.importorskip("minari.storage.remotes")
NAME = "count/up-v0"
CHUNK = 10 * 1024 * 1024
"""Bytes that the library of Hugging Face writes at a time."""
STEPS = 600_000
"""Steps of 22 bytes: a file that is longer than one chunk."""


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


def test_only_the_files_of_the_dataset_are_taken(tmp_path, remote, monkeypatch):
    """A repository has a description, and a prefix such as `up-v0` also matches `up-v01`."""

    def download_more(self, dataset_id, path):
        shutil.copytree(remote, path / dataset_id)
        for extra in ("README.md", ".gitattributes", "data/notes.txt"):
            (path / dataset_id / extra).write_text("not data")
        shutil.copytree(remote, path / f"{dataset_id}1")

    monkeypatch.setattr(DirectoryRemote, "download_dataset", download_more)
    dataset = download_dataset(tmp_path / "root", NAME)
    files = sorted(str(path.relative_to(dataset.path)) for path in dataset.path.rglob("*") if path.is_file())
    assert files == ["data/main_data.hdf5", "data/metadata.json", "manifest.json"]
    assert [row.dataset_id for row in list_datasets(tmp_path / "root")] == [NAME]


def test_the_output_of_a_remote_is_not_ours_and_the_size_on_disk_is_reported(tmp_path, remote, monkeypatch, capsys):
    download = DirectoryRemote.download_dataset

    def print_and_download(self, dataset_id, path):
        sys.stdout.write("* Downloading data file\n")
        download(self, dataset_id, path)

    monkeypatch.setattr(DirectoryRemote, "download_dataset", print_and_download)
    reports = []
    download_dataset(tmp_path / "root", NAME, report=lambda done, total: reports.append((done, total)))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "* Downloading data file\n")
    size = sum(path.stat().st_size for path in (remote / "data").iterdir())
    declared = json.loads((remote / "data" / "metadata.json").read_text())["dataset_size"]
    assert reports[-1] == (size, int(declared * 1e6))


class Hub:
    """A small Hugging Face hub with one repository. With `breaks_at` the data breaks off there and is then refused."""

    def __init__(self, files):
        self.files, self.commit, self.breaks_at = files, "c" * 40, None
        self.requests = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *words):
                pass

            def do_HEAD(self):
                self.answer(body=False)

            def do_GET(self):
                self.answer(body=True)

            def answer(self, *, body):
                # /datasets/OWNER/REPOSITORY/resolve/REVISION/PATH
                name = self.path.partition("?")[0].split("/resolve/", 1)[-1].partition("/")[2]
                data = hub.files.get(name)
                first = int((self.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
                if body:
                    hub.requests.append((name, first))
                breaks = body and hub.breaks_at is not None and name.endswith(".hdf5")
                if data is None or (breaks and first):
                    self.send_response(404 if data is None else 403)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(206 if first else 200)
                if first:
                    self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
                self.send_header("Content-Length", str(len(data) - first))
                self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
                self.send_header("X-Repo-Commit", hub.commit)
                self.end_headers()
                if breaks:
                    self.wfile.write(data[: hub.breaks_at])
                    self.close_connection = True
                elif body:
                    self.wfile.write(data[first:])

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def hub(tmp_path):
    dataset = make_dataset(tmp_path / "remote", "up-v0", [count_up(STEPS)])
    files = {
        f"data/{name}": (dataset.path / "data" / name).read_bytes() for name in ("metadata.json", "main_data.hdf5")
    }
    hub = Hub(files)
    thread = threading.Thread(target=hub.server.serve_forever)
    thread.start()
    yield hub
    hub.server.shutdown()
    thread.join()
    hub.server.server_close()


def download_from(hub, root, tmp_path):
    """Download in a process of its own, because the library reads the address of the hub when it is imported."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from palaestra.errors import PalaestraError\n"
        "from palaestra.experience.datasets.download import download_dataset\n"
        "try:\n"
        f"    print(download_dataset(Path({str(root)!r}), 'up-v0', lambda seconds: None).total_steps)\n"
        "except PalaestraError as error:\n"
        "    sys.exit(f'{type(error).__name__}: {error}')\n"
    )
    removed = ("MINARI_REMOTE", "HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
    variables = {name: value for name, value in os.environ.items() if name not in removed}
    variables |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
    return subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=False, timeout=120
    )


def test_a_download_from_hugging_face_continues_where_it_stopped(tmp_path, hub):
    root, main = tmp_path / "root", "data/main_data.hdf5"
    hub.breaks_at = CHUNK + 1000
    broken = download_from(hub, root, tmp_path)
    assert broken.returncode == 1, broken.stderr
    assert "DownloadFailed: up-v0 cannot be downloaded" in broken.stderr
    (row,) = list_downloads(root)
    assert row.size_bytes == CHUNK + len(hub.files["data/metadata.json"])
    hub.breaks_at = None
    hub.requests.clear()
    done = download_from(hub, root, tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{STEPS}\n"), done.stderr
    assert [first for name, first in hub.requests if name == main] == [CHUNK]
    assert (find_dataset("up-v0", root).path / main).read_bytes() == hub.files[main]
    assert not (root / ".downloads").exists()


def write_part(root, commit, data):
    """What an interrupted download leaves."""
    with hold_download(root, "up-v0") as place:
        part = place / commit / "data" / "main_data.hdf5"
        part.parent.mkdir(parents=True)
        part.write_bytes(data)
    return part


def test_a_part_of_another_commit_is_not_continued(tmp_path, hub):
    write_part(tmp_path / "root", "d" * 40, hub.files["data/main_data.hdf5"][:1000])
    done = download_from(hub, tmp_path / "root", tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("data/main_data.hdf5", 0) in hub.requests


def test_a_part_whose_bytes_are_not_those_of_the_hub_is_refused_and_removed(tmp_path, hub):
    part = write_part(tmp_path / "root", hub.commit, bytes(1000))
    damaged = download_from(hub, tmp_path / "root", tmp_path)
    assert (damaged.returncode, "the SHA-256 of data/main_data.hdf5 is not" in damaged.stderr) == (1, True)
    assert hub.requests[-1] == ("data/main_data.hdf5", 1000)
    assert not part.exists()


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
        "palaestra.experience.datasets.disk_space.shutil.disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0)
    )
    with pytest.raises(DatasetError, match="0 B are free"):
        download_dataset(tmp_path / "root", NAME)
    assert DirectoryRemote.calls == []


def test_a_download_without_reference_scores_gets_those_that_are_given(tmp_path, remote):
    dataset = download_dataset(tmp_path / "root", NAME, scores=MissingScores(random=1.0, expert=5.0))
    assert (dataset.random_score, dataset.expert_score) == (1.0, 5.0)


def test_a_score_that_the_remote_has_is_refused_before_the_download(tmp_path, remote):
    metadata = remote / "data" / "metadata.json"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"ref_max_score": 4.0}))
    with pytest.raises(ConfigError, match=r"--expert-score = 5.0: the metadata of the dataset says 4"):
        download_dataset(tmp_path / "root", NAME, scores=MissingScores(expert=5.0))
    assert DirectoryRemote.calls == []


def test_reference_scores_of_the_remote_that_make_no_sense_are_refused_before_the_download(tmp_path, remote):
    metadata = remote / "data" / "metadata.json"
    original = json.loads(metadata.read_text())
    for scores in ({"ref_max_score": float("nan")}, {"ref_min_score": 5.0, "ref_max_score": 4.0}):
        metadata.write_text(json.dumps(original | scores))
        with pytest.raises(DatasetError, match=r"ref_max_score = .*Get it with `minari download count/up-v0`"):
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
