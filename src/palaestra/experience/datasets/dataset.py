"""Datasets on disk: find, list, open and write them. The layout is described in `manifest` and `storage`."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from palaestra.config import suggest_name
from palaestra.errors import DatasetError
from palaestra.experience.datasets.episodes import ArrayLayout, Episode, TransitionArrays
from palaestra.experience.datasets.manifest import (
    DATA,
    INDEX,
    MANIFEST,
    Manifest,
    check_dataset_id,
    check_digests,
    check_sizes,
    measure_bytes,
    read_manifest,
    remember_verified,
    was_verified,
    write_manifest,
)
from palaestra.experience.datasets.scores import EXPERT_KEY, RANDOM_KEY, normalize_score, read_score
from palaestra.experience.datasets.spaces import Space, nest, space_from_json, space_to_json
from palaestra.experience.datasets.storage import (
    MAIN,
    METADATA,
    EpisodeFile,
    check_memory,
    import_h5py,
    read_episodes,
    read_with_index,
)
from palaestra.files.atomic import atomic_directory, remove_stale_files, sync, write_bytes

MINARI_VERSION = "0.5.4"
"""The version of Minari whose layout is written."""
READABLE_VERSIONS = ("0.4.0", "0.4.1", "0.4.2", "0.4.3", "0.5.0", "0.5.1", "0.5.2", "0.5.3", "0.5.4")
_PLACE = "dataset"
_AGAIN = "Create, import or download it again"

State: TypeAlias = Literal["verified", "unchecked", "damaged", "unverified", "incomplete"]
"""`verified`: the files are those whose digests matched; `unchecked`: their sizes match; `damaged`: they do not, or the
dataset cannot be read; `unverified`: there is no manifest to compare with; `incomplete`: a part of a download."""


@dataclass(frozen=True)
class Dataset:
    """A dataset whose files matched their digests."""

    dataset_id: str
    path: Path
    env_id: str
    """The environment that the data comes from; empty if it is unknown."""
    observation_space: Space
    action_space: Space
    total_steps: int
    total_episodes: int
    random_score: float | None
    """Mean return of random actions (Minari's ref_min_score)."""
    expert_score: float | None
    """Mean return of an expert (Minari's ref_max_score)."""
    sha256: str
    """Digest of the manifest, which has the digests of all files; empty for files that are not listed in one."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """How it was made: policy, seed, checkpoint and so on."""

    def load_transitions(self) -> TransitionArrays:
        """All steps in memory; `ConfigError` if they do not fit there."""
        layout = ArrayLayout(self.observation_space, self.action_space)
        check_memory(layout, self.total_steps, self.dataset_id)
        main, index = self.path / DATA / MAIN, self.path / INDEX
        if self.sha256 and index.exists():
            return read_with_index(main, index, layout, self.total_steps)
        return read_episodes(main, layout, self.total_episodes, self.total_steps)

    def normalized_score(self, mean_return: float) -> float | None:
        """0 for the return of random actions and 100 for an expert's; None if the scores do not allow it."""
        return normalize_score(mean_return, self.random_score, self.expert_score)


@dataclass(frozen=True, kw_only=True)
class DatasetSummary:
    """One row of a list of datasets."""

    dataset_id: str
    path: str
    state: State
    problem: str = ""
    """Why it is damaged or unverified."""
    env_id: str = ""
    total_steps: int = 0
    total_episodes: int = 0
    random_score: float | None = None
    expert_score: float | None = None
    size_bytes: int = 0
    created: float = 0.0
    """Unix time of its data."""
    last_used: float = 0.0
    """Unix time at which it was last opened for learning, or made."""
    sha256: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """What a new dataset says about itself."""

    dataset_id: str
    env_id: str
    observation_space: Space
    action_space: Space
    env_spec: str = ""
    """The environment's specification as Gymnasium writes it; empty for one that is not registered."""
    random_score: float | None = None
    expert_score: float | None = None
    algorithm: str = ""
    description: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)


def find_dataset(name: str, root: Path, *, mark_used: bool = True) -> Dataset:
    """A dataset by its id, or by the path of its directory, after comparing every byte with its manifest.

    `DatasetError` if there is none of this name, if it is damaged, or if it has no manifest. `mark_used` makes it the
    last that `datasets prune` removes.
    """
    directory, manifest = _find_manifest(name, root)
    check_digests(directory, manifest)
    dataset = read_dataset(directory, manifest)
    if directory.is_relative_to(root):
        _check_place(manifest, directory.relative_to(root).as_posix())
        remember_verified(root, directory, manifest)
    if mark_used:
        with contextlib.suppress(OSError):
            os.utime(directory / MANIFEST)
    return dataset


def find_unverified(name: str, root: Path) -> Dataset:
    """A dataset like that of `find_dataset`, from its metadata and manifest alone.

    Its files are not compared with their digests, and it does not count as used.
    """
    return read_dataset(*_find_manifest(name, root))


def _find_manifest(name: str, root: Path) -> tuple[Path, Manifest]:
    directory = _find_directory(name, root)
    manifest = read_manifest(directory)
    if manifest is None:
        remedy = f"Check and adopt it with: palaestra datasets import {directory}"
        raise DatasetError(_PLACE, name, "has no manifest, so its files cannot be verified", remedy)
    return directory, manifest


def _check_place(manifest: Manifest, dataset_id: str) -> None:
    if manifest.dataset_id != dataset_id:
        # Minari refuses it as well.
        reason = f"its directory was renamed: its manifest says {manifest.dataset_id}"
        raise DatasetError(_PLACE, dataset_id, reason, "Rename the directory, or import it under its own name")


def list_datasets(root: Path) -> list[DatasetSummary]:
    """All datasets below a directory, sorted by id. Reads no data; `find_dataset` verifies."""
    return [summarize(root / dataset_id, root) for dataset_id in sorted(_iterate_ids(root))]


def summarize(directory: Path, root: Path) -> DatasetSummary:
    """The row of one dataset."""
    dataset_id = directory.relative_to(root).as_posix()
    facts: dict[str, Any] = {"dataset_id": dataset_id, "path": str(directory), **_measure(directory)}
    try:
        manifest = read_manifest(directory)
        dataset = read_dataset(directory, manifest)
        keys = ("env_id", "total_steps", "total_episodes", "random_score", "expert_score", "sha256", "about")
        facts |= {key: getattr(dataset, key) for key in keys}
        if manifest is None:
            problem = "it has no manifest; adopt it with: palaestra datasets import"
            return DatasetSummary(**facts, state="unverified", problem=problem)
        _check_place(manifest, dataset_id)
        check_sizes(directory, manifest)
    except DatasetError as error:
        return DatasetSummary(**facts, state="damaged", problem=error.reason)
    except OSError as error:
        return DatasetSummary(**facts, state="damaged", problem=str(error))
    return DatasetSummary(**facts, state="verified" if was_verified(root, directory, manifest) else "unchecked")


def _measure(directory: Path) -> dict[str, Any]:
    """Size and times of the files of a dataset, as far as they can be read."""
    created, used = 0.0, 0.0
    with contextlib.suppress(OSError):
        created = (directory / DATA / MAIN).stat().st_mtime
        used = created
        used = max(used, (directory / MANIFEST).stat().st_mtime)
    return {"size_bytes": measure_bytes(directory), "created": created, "last_used": used}


def _iterate_ids(root: Path, namespace: str = "") -> Iterator[str]:
    place = root / namespace
    if namespace and (place / DATA).is_dir():
        yield namespace
        return
    try:
        entries = [entry.name for entry in os.scandir(place) if entry.is_dir() and not entry.name.startswith(".")]
    except OSError:
        return
    for name in entries:
        if namespace.count("/") < 8:
            yield from _iterate_ids(root, f"{namespace}/{name}".lstrip("/"))


def _find_directory(name: str, root: Path) -> Path:
    path = Path(name)
    if path.is_absolute() or name.startswith("."):
        if (path / DATA / METADATA).is_file():
            return path
        raise DatasetError(_PLACE, name, f"is not a directory with {DATA}/{METADATA}", "Check the path")
    check_dataset_id(name)
    directory = root / name
    if not (directory / DATA).is_dir():
        known = list(_iterate_ids(root))
        otherwise = "palaestra datasets list shows all; palaestra datasets create makes one"
        raise DatasetError(_PLACE, name, f"there is none of this name in {root}", suggest_name(name, known, otherwise))
    return directory


def read_dataset(directory: Path, manifest: Manifest | None) -> Dataset:
    """The dataset in a directory, from its metadata alone; nothing is verified."""
    path = directory / DATA / METADATA
    try:
        metadata = json.loads(path.read_bytes())
        version, form = str(metadata["minari_version"]), str(metadata["data_format"])
        counts = metadata["total_steps"], metadata["total_episodes"]
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(f"{counts} are not numbers of steps and episodes")
        scores = [read_score(metadata.get(key)) for key in (RANDOM_KEY, EXPERT_KEY)]
        dataset_id = str(metadata["dataset_id"])
        spec = metadata.get("env_spec")
        env_id = "" if not spec else str(json.loads(spec)["id"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"its {METADATA} cannot be read ({type(error).__name__}: {error})"
        raise DatasetError(_PLACE, str(directory), reason, _AGAIN) from None
    if version not in READABLE_VERSIONS:
        remedy = f"Readable are {READABLE_VERSIONS[0]} to {READABLE_VERSIONS[-1]}; convert it with another Minari"
        raise DatasetError("minari_version", version, f"{dataset_id} was written by a version unknown here", remedy)
    if form != "hdf5":
        remedy = "Create it again with data_format='hdf5'"
        raise DatasetError("data_format", form, f"{dataset_id} is not stored as HDF5", remedy)
    for key in ("observation_space", "action_space"):
        if key not in metadata:
            raise DatasetError(key, None, f"the metadata of {dataset_id} does not have it", _AGAIN)
    dataset = Dataset(
        manifest.dataset_id if manifest else dataset_id,
        directory,
        (manifest.env_id if manifest else "") or env_id,
        space_from_json(metadata["observation_space"], "observation_space"),
        space_from_json(metadata["action_space"], "action_space"),
        total_steps=counts[0],
        total_episodes=counts[1],
        random_score=scores[0],
        expert_score=scores[1],
        sha256=manifest.sha256 if manifest else "",
        about=manifest.about if manifest else {},
    )
    ArrayLayout(dataset.observation_space, dataset.action_space)
    return dataset


class DatasetWriter:
    """Writes the episodes of a new dataset; used within `create_dataset`."""

    def __init__(self, directory: Path, facts: DatasetFacts) -> None:
        self.facts = facts
        self._directory = directory
        (directory / DATA).mkdir()
        self.layout = ArrayLayout(nest(facts.observation_space), facts.action_space)
        self._episodes = EpisodeFile(directory / DATA / MAIN, self.layout)

    @property
    def num_steps(self) -> int:
        """Number of steps written."""
        return self._episodes.num_steps

    @property
    def num_episodes(self) -> int:
        """Number of episodes written."""
        return self._episodes.num_episodes

    def add(self, episode: Episode) -> None:
        """Append an episode; `DatasetError` if it does not fit the spaces."""
        self._episodes.add(episode)

    def abort(self) -> None:
        """Close the file of an incomplete dataset."""
        self._episodes.close()

    def finish(self, facts: DatasetFacts) -> None:
        """Write the metadata, the index and the manifest."""
        self._episodes.close()
        if not self.num_steps:
            raise DatasetError(_PLACE, facts.dataset_id, "would have no steps", "Collect at least one")
        main = self._directory / DATA / MAIN
        metadata: dict[str, Any] = {
            "total_episodes": self.num_episodes,
            "total_steps": self.num_steps,
            "data_format": "hdf5",
            "jpeg_encoding": False,
            "observation_space": json.dumps(space_to_json(nest(facts.observation_space))),
            "action_space": json.dumps(space_to_json(facts.action_space)),
            "dataset_id": facts.dataset_id,
            "minari_version": MINARI_VERSION,
            "dataset_size": round(main.stat().st_size / 1e6, 1),
            "algorithm_name": facts.algorithm,
            "description": facts.description,
        }
        optional = {"env_spec": facts.env_spec, RANDOM_KEY: facts.random_score, EXPERT_KEY: facts.expert_score}
        metadata |= {key: value for key, value in optional.items() if value not in (None, "")}
        write_bytes(self._directory / DATA / METADATA, json.dumps(metadata).encode())
        write_bytes(self._directory / INDEX, self._episodes.index())
        write_manifest(self._directory, facts.dataset_id, facts.env_id, facts.about)


@contextmanager
def create_dataset(root: Path, facts: DatasetFacts) -> Iterator[DatasetWriter]:
    """Write a dataset under a temporary name; it appears when the block ends and is removed if it raises.

    The block may replace `writer.facts`, for example with a score that is known at the end.
    """
    import_h5py()
    with new_directory(root, facts.dataset_id) as directory:
        writer = DatasetWriter(directory, facts)
        try:
            yield writer
            writer.finish(writer.facts)
        finally:
            writer.abort()


@contextmanager
def new_directory(root: Path, dataset_id: str) -> Iterator[Path]:
    """A temporary directory that becomes the directory of a dataset when the block ends."""
    target = check_new(root, dataset_id)
    existing = next(place for place in target.parents if place.exists())
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale_files(target.parent)
        with atomic_directory(target) as directory:
            yield directory
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another one was faster
            raise _exists_error(dataset_id) from None
        remove_empty_directories(target.parent, existing)
        raise
    manifest = read_manifest(target)
    if manifest is not None:
        remember_verified(root, target, manifest)


def check_new(root: Path, dataset_id: str) -> Path:
    """The directory of a dataset that does not exist yet; otherwise `DatasetError`."""
    check_dataset_id(dataset_id)
    target = root / dataset_id
    if os.path.lexists(target):
        raise _exists_error(dataset_id)
    for place in target.parents:
        if place == root:
            break
        if (place / DATA).exists() or (place.exists() and not place.is_dir()):
            reason = f"{place.relative_to(root)} is not a namespace"
            raise DatasetError(_PLACE, dataset_id, reason, "Choose another namespace")
    return target


def _exists_error(dataset_id: str) -> DatasetError:
    remedy = f"Choose another version, or remove it with: palaestra datasets prune {dataset_id}"
    return DatasetError(_PLACE, dataset_id, "exists already and is never overwritten", remedy)


def delete_dataset(root: Path, dataset_id: str) -> None:
    """Delete a dataset. It disappears at once, and its files afterwards."""
    directory = _find_directory(check_dataset_id(dataset_id), root)
    if directory.is_symlink():
        directory.unlink()
    else:
        hidden = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
        os.rename(directory, hidden)
        shutil.rmtree(hidden)
    sync(directory.parent)
    remove_empty_directories(directory.parent, root)


def remove_empty_directories(place: Path, last: Path) -> None:
    """Remove empty directories from `place` up to, but without, `last`."""
    while place != last and place.is_relative_to(last):
        try:
            place.rmdir()
        except OSError:
            return
        place = place.parent
