"""Downloads datasets from a remote of Minari: Hugging Face unless `$MINARI_REMOTE` names another one.

Files arrive under `<root>/.downloads/<dataset_id>/`, which is kept after a failure. From Hugging Face the next attempt
continues within a file: its own library deletes the part that has arrived, so files are fetched here with its
functions. Other remotes start again. A complete download is checked like an import, gets its manifest, and then appears
under its name.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from palaestra.errors import ConfigError, DatasetError, DownloadFailed
from palaestra.experience.datasets.dataset import READABLE_VERSIONS, Dataset, check_new
from palaestra.experience.datasets.disk_space import check_disk
from palaestra.experience.datasets.import_data import import_minari
from palaestra.experience.datasets.incomplete_downloads import delete_download, hold_download
from palaestra.experience.datasets.manifest import DATA, measure_bytes
from palaestra.experience.datasets.scores import (
    EXPERT_KEY,
    RANDOM_KEY,
    MissingScores,
    check_metadata_scores,
    read_score,
)
from palaestra.experience.datasets.storage import MAIN, METADATA, import_h5py
from palaestra.files.checkpoint import digest_file

ReportBytes: TypeAlias = Callable[[int, int], None]
"""Called with the bytes that have arrived and with those of the dataset, 0 if that is unknown."""
_HUB = "hf://"
_ATTEMPTS = 3
_PAUSE_S = 2.0
_REPORT_EVERY_S = 0.5
_SHA256_DIGITS = 64
_UNKNOWN = {"EntryNotFoundError", "RepositoryNotFoundError", "RemoteEntryNotFoundError", "KeyError"}
"""Names of errors that mean that the remote answered and has no such dataset."""


def download_dataset(
    root: Path,
    dataset_id: str,
    pause: Callable[[float], None] = time.sleep,
    report: ReportBytes | None = None,
    scores: MissingScores | None = None,
) -> Dataset:
    """Download, check and adopt a dataset.

    `DatasetError` if there is none of this name or it cannot be read here, `DownloadFailed` if the remote does not
    answer. A broken connection is tried again; what has arrived is kept.
    """
    check_new(root, dataset_id)
    import_h5py()
    remote = _open_remote(dataset_id)
    with hold_download(root, dataset_id) as place:
        # Remotes print what they do.
        with redirect_stdout(sys.stderr):
            metadata = _retry(lambda: remote.get_dataset_metadata(dataset_id), dataset_id, pause)
            _check_metadata(metadata, dataset_id)
            scores = scores or MissingScores()
            check_metadata_scores(
                metadata, f"Get it with `minari download {dataset_id}`, correct it there, and import it"
            )
            scores.check(*(read_score(metadata.get(key)) for key in (RANDOM_KEY, EXPERT_KEY)))
            size = metadata.get("dataset_size")
            total = int(size * 1e6) if isinstance(size, int | float) else 0
            check_disk(root, max(0, total - measure_bytes(place)), dataset_id)
            with _report_size(place, total, report):
                source = _retry(lambda: _fetch(remote, dataset_id, place), dataset_id, pause)
        for name in (METADATA, MAIN):
            if not (source / DATA / name).is_file():
                raise DownloadFailed(f"{dataset_id}: the remote sent no {DATA}/{name}. Try again later.")
        about = {"imported": "download", "remote": _remote_name()}
        dataset = import_minari(root, source, dataset_id, about, move=True, scores=scores)
    delete_download(root, dataset_id)
    return dataset


@contextmanager
def _report_size(place: Path, total: int, report: ReportBytes | None) -> Iterator[None]:
    """Report the bytes in a directory until the block ends. The remotes have no progress in common, files have."""
    if report is None:
        yield
        return
    finished = threading.Event()

    def report_until_finished() -> None:
        while not finished.wait(_REPORT_EVERY_S):
            report(measure_bytes(place), total)

    thread = threading.Thread(target=report_until_finished, name="download-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
        report(measure_bytes(place), total)


def _fetch(remote: Any, dataset_id: str, place: Path) -> Path:
    """Fetch the files of a dataset; returns the directory that holds them."""
    name = _remote_name()
    if name.startswith(_HUB):
        return _fetch_from_hub(name.removeprefix(_HUB), dataset_id, place)
    remote.download_dataset(dataset_id, place)
    return place / dataset_id


def _fetch_from_hub(owner: str, dataset_id: str, place: Path) -> Path:
    """Fetch the two files of a dataset of one commit, each from the byte at which an earlier attempt stopped."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented, not in __all__

    repository, _, folder = dataset_id.partition("/")

    def build_url(name: str, commit: str | None = None) -> str:
        path = "/".join(filter(None, (folder, DATA, name)))
        return hf_hub_url(f"{owner}/{repository}", path, repo_type="dataset", revision=commit)

    commit = get_hf_file_metadata(build_url(METADATA)).commit_hash or "main"
    source = place / commit
    for path in place.iterdir():  # of another commit
        if path != source:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (source / DATA).mkdir(parents=True, exist_ok=True)
    for name in (METADATA, MAIN):
        url, path = build_url(name, commit), source / DATA / name
        facts = get_hf_file_metadata(url)
        with open(path, "ab") as file:
            if facts.size is None or file.tell() > facts.size:
                file.seek(0)
                file.truncate()
            http_get(url, file, resume_size=file.tell(), headers=build_hf_headers(), expected_size=facts.size)
        # The tag of a large file is its digest.
        etag = facts.etag or ""
        if len(etag) == _SHA256_DIGITS and digest_file(path).sha256 != etag:
            path.unlink()
            raise DownloadFailed(f"{dataset_id}: the SHA-256 of {DATA}/{name} is not {etag}. Download it again.")
    return source


def _remote_name() -> str:
    return os.environ.get("MINARI_REMOTE") or f"{_HUB}farama-minari"


def _open_remote(dataset_id: str) -> Any:
    # The bars of the remotes, which `report` replaces.
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
        os.environ.setdefault(name, "1")
    try:
        from minari.storage.remotes import get_cloud_storage
    except ImportError:
        raise ConfigError("minari", None, "is not installed", "pip install 'palaestra[offline]'") from None
    name = _remote_name()
    if name.startswith(_HUB):
        _check_network(dataset_id)
    try:
        return get_cloud_storage(name)
    except (KeyError, ValueError):
        raise ConfigError("MINARI_REMOTE", name, "is no remote of Minari", "Write hf://NAME or gcp://NAME") from None
    except ImportError as error:
        reason = f"needs a package that is not installed ({error})"
        raise ConfigError("MINARI_REMOTE", name, reason, "pip install 'minari[gcs]'") from None


def _check_network(dataset_id: str) -> None:
    """Raise at once if there is no network; Hugging Face would retry for half a minute."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return
    host = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname or ""
    try:
        socket.getaddrinfo(host, 443)
    except OSError as error:
        raise _no_network(dataset_id, f"{host} cannot be resolved: {error.strerror or error}") from None


def _no_network(dataset_id: str, reason: str) -> DownloadFailed:
    hint = f"download it elsewhere with `minari download {dataset_id}` and import its directory here"
    return DownloadFailed(f"{dataset_id} cannot be downloaded ({reason}). Check the network, or {hint}.")


def _retry(call: Callable[[], Any], dataset_id: str, pause: Callable[[float], None]) -> Any:
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return call()
        except (DatasetError, ConfigError, DownloadFailed):
            raise
        except Exception as error:
            # The libraries of the remotes share no base class of errors.
            if {kind.__name__ for kind in type(error).__mro__} & _UNKNOWN and not _is_offline(error):
                remedy = "Look up the id: minari list remote"
                raise DatasetError("dataset", dataset_id, f"{_remote_name()} has none of this name", remedy) from None
            if attempt == _ATTEMPTS:
                text = (str(error).strip().splitlines() or [""])[0]
                raise _no_network(dataset_id, f"{type(error).__name__}: {text}") from error
            pause(_PAUSE_S * attempt)
    return None


def _is_offline(error: BaseException) -> bool:
    return type(error).__name__ == "LocalEntryNotFoundError"


def _check_metadata(metadata: Any, dataset_id: str) -> None:
    version = metadata.get("minari_version") if isinstance(metadata, dict) else None
    if version not in READABLE_VERSIONS:
        remedy = f"Readable are {READABLE_VERSIONS[0]} to {READABLE_VERSIONS[-1]}; look for another version of it"
        raise DatasetError("minari_version", version, f"{dataset_id} was written by a version unknown here", remedy)
    form = metadata.get("data_format", "hdf5")
    if form != "hdf5":
        raise DatasetError("data_format", form, f"{dataset_id} is not stored as HDF5", "Choose another dataset")
