"""Imports data that others made: HDF5 files in the style of D4RL, and directories of Minari.

A file in the style of D4RL holds `observations`, `actions`, `rewards`, `terminals`, and usually `timeouts` and
`next_observations`, each with one row per step. Everything else in it is ignored. Only arrays of numbers that lie in
the file itself are read: links, virtual arrays and arrays in external files are refused.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from palaestra.errors import DatasetError
from palaestra.experience.datasets.dataset import (
    Dataset,
    DatasetFacts,
    check_new,
    create_dataset,
    find_dataset,
    new_directory,
    read_dataset,
)
from palaestra.experience.datasets.disk_space import check_disk, estimate_bytes
from palaestra.experience.datasets.episodes import ArrayLayout, Episode, read_flags
from palaestra.experience.datasets.manifest import (
    DATA,
    INDEX,
    MANIFEST,
    check_dataset_id,
    check_digests,
    list_files,
    read_manifest,
    write_manifest,
)
from palaestra.experience.datasets.scores import MissingScores, check_metadata_scores
from palaestra.experience.datasets.spaces import Array, nest
from palaestra.experience.datasets.storage import MAIN, METADATA, has_link, open_hdf5, read_array
from palaestra.files.atomic import write_bytes
from palaestra.files.checkpoint import digest_file

_REQUIRED = ("observations", "actions", "rewards", "terminals")
_TOLERANCE = 1e-5
"""Files that were written in float32 repeat an observation within this distance."""


@dataclass(frozen=True)
class ImportReport:
    """What an import did with the steps of a file."""

    dataset: Dataset
    steps_read: int
    steps_dropped: int
    """Last steps of episodes that did not terminate and whose next observation is not in the file."""


def import_d4rl(root: Path, file: Path, facts: DatasetFacts, *, max_episode_steps: int | None = None) -> ImportReport:
    """Import an HDF5 file in the style of D4RL.

    `max_episode_steps` ends episodes in files without `timeouts`, as D4RL does.
    """
    check_new(root, facts.dataset_id)
    layout = ArrayLayout(nest(facts.observation_space), facts.action_space)
    if layout.is_dict:
        reason = "files of this style hold one array of observations, not a Dict"
        raise DatasetError("--env", facts.env_id, reason, "Import a directory of Minari instead")
    if not file.is_file():
        raise DatasetError("file", str(file), "is not a file", "Give an HDF5 file, or a directory of Minari")
    steps = _read_steps(file)
    total = len(steps["rewards"])
    check_disk(root, estimate_bytes(layout, total, total // 100), facts.dataset_id)
    has_next = "next_observations" in steps
    about = {
        **facts.about,
        "imported": file.name,
        "file_sha256": digest_file(file).sha256,
        "next_observations": "in the file" if has_next else "reconstructed",
    }
    kept = 0
    with create_dataset(root, replace(facts, about=about)) as writer:
        for episode in split_episodes(steps, max_episode_steps):
            writer.add(episode)
            kept += len(episode)
        dropped = total - kept
        writer.facts = replace(writer.facts, about={**about, "steps_dropped": dropped})
    return ImportReport(find_dataset(facts.dataset_id, root), total, dropped)


def _read_steps(path: Path) -> dict[str, Array]:
    """The arrays of a file, checked against each other."""
    with open_hdf5(path, "file") as file:
        for name in _REQUIRED:
            if not has_link(file, name):
                held = ", ".join(sorted(map(str, file.keys()))[:10])
                reason = f"has no array {name!r} (it has: {held or 'nothing'})"
                raise DatasetError("file", str(path), reason, f"D4RL's layout needs {', '.join(_REQUIRED)}")
        names = [*_REQUIRED, *(name for name in ("timeouts", "next_observations") if has_link(file, name))]
        steps = {name: read_array(file, name) for name in names}
    total = len(steps["observations"]) if steps["observations"].ndim else 0
    for name in ("rewards", "terminals", "timeouts"):
        # Some files have a column of one number.
        if name in steps and steps[name].shape == (total, 1):
            steps[name] = steps[name][:, 0]
        if name in steps and steps[name].ndim != 1:
            raise DatasetError(name, list(steps[name].shape), "is not one number per step", "Check the file")
    for name, array in steps.items():
        if array.ndim == 0 or len(array) != total:
            length = len(array) if array.ndim else 0
            reason = f"has {length:,} rows, but observations has {total:,}"
            raise DatasetError(name, list(array.shape), reason, "Check the file")
    if not total:
        raise DatasetError("file", str(path), "has no steps", "Choose another file")
    if "next_observations" in steps and steps["next_observations"].shape != steps["observations"].shape:
        shape = list(steps["next_observations"].shape)
        raise DatasetError("next_observations", shape, "has another shape than observations", "Check the file")
    return steps


def split_episodes(steps: dict[str, Array], max_episode_steps: int | None = None) -> Iterator[Episode]:
    """The episodes in the arrays of a file.

    An episode ends where `terminals` or `timeouts` is set, and where the next observation of a step is not the
    observation of the following one. Without `next_observations` the observation after a terminal step is unknown; the
    last one is repeated, because its value never counts. The last step of any other episode is dropped. `DatasetError`
    for a flag that is neither 0 nor 1.
    """
    observations, terminals = steps["observations"], read_flags(steps["terminals"], "terminals")
    total = len(terminals)
    ends = terminals.copy()
    if "timeouts" in steps:
        ends |= read_flags(steps["timeouts"], "timeouts")
    elif max_episode_steps:
        _end_by_limit(ends, max_episode_steps)
    following = steps.get("next_observations")
    if following is not None:
        same = np.isclose(following[:-1], observations[1:], rtol=_TOLERANCE, atol=_TOLERANCE)
        ends[:-1] |= ~same.reshape(total - 1, -1).all(axis=1)
    ends[-1] = True
    first = 0
    for last in np.flatnonzero(ends):
        end = int(last) + 1
        if following is not None:
            final = following[end - 1 : end]
        elif terminals[last]:
            final = observations[end - 1 : end]
        else:
            end, final = end - 1, observations[end - 1 : end]
        if end > first:
            terminated = terminals[first:end]
            truncated = np.zeros(end - first, np.bool_)
            truncated[-1] = not terminated[-1]
            rows = np.concatenate([observations[first:end], final])
            yield Episode({"": rows}, steps["actions"][first:end], steps["rewards"][first:end], terminated, truncated)
        first = int(last) + 1


def _end_by_limit(ends: Array, limit: int) -> None:
    """Mark the steps at which an episode reaches the limit."""
    first = 0
    while first < len(ends):
        terminal = np.flatnonzero(ends[first : first + limit])
        last = first + int(terminal[0]) if len(terminal) else first + limit - 1
        if last < len(ends):
            ends[last] = True
        first = last + 1


def import_minari(
    root: Path,
    directory: Path,
    dataset_id: str = "",
    about: Mapping[str, Any] | None = None,
    *,
    move: bool = False,
    scores: MissingScores | None = None,
) -> Dataset:
    """Check a directory that Minari or palaestra made, and take it in.

    A directory inside `root` stays where it is and gets a manifest; another one is copied. With `move` the two files of
    Minari are moved and everything else in the directory is ignored. `DatasetError` if an episode is damaged, or if the
    directory has a manifest that does not fit.
    """
    if not (directory / DATA / METADATA).is_file():
        remedy = f"Give the directory of one dataset, with {DATA}/{METADATA} and {DATA}/{MAIN} in it"
        raise DatasetError("directory", str(directory), f"is no Minari directory: it has no {DATA}/{METADATA}", remedy)
    manifest = None if move else read_manifest(directory)
    if manifest is not None:
        check_digests(directory, manifest)
    dataset = read_dataset(directory, manifest)
    target = check_dataset_id(dataset_id or dataset.dataset_id, "--id")
    if dataset.dataset_id != target:
        # Minari refuses a dataset whose directory and metadata disagree.
        raise DatasetError("--id", target, f"its metadata says {dataset.dataset_id}", f"Use {dataset.dataset_id}")
    metadata = json.loads((directory / DATA / METADATA).read_bytes())
    if manifest is None:
        # A dataset that has a manifest is taken as it is: correcting its metadata would contradict its digests.
        check_metadata_scores(metadata, f"Correct or remove it in {DATA}/{METADATA}")
    settings = _read_settings(metadata)
    facts = {"imported": "minari", **settings, **(about or {})} if manifest is None else manifest.about
    is_inside = directory.resolve() == (root / target).resolve()
    if not is_inside:
        check_new(root, target)
        needed = 0 if move else sum((directory / name).stat().st_size for name in list_files(directory))
        check_disk(root, needed, target)
    elif manifest is not None:
        remedy = f"Verify it with: palaestra datasets verify {target}"
        raise DatasetError("dataset", target, "has a manifest already", remedy)
    if not move:
        _check_files(dataset)
    dataset.load_transitions()
    added = (scores or MissingScores()).find_for(dataset.env_id, dataset.random_score, dataset.expert_score, settings)
    if is_inside:
        _add_scores(directory, added)
        write_manifest(directory, target, dataset.env_id, facts)
        return find_dataset(target, root)
    with new_directory(root, target) as copy:
        if manifest is not None:
            shutil.copytree(directory, copy, dirs_exist_ok=True)
        else:
            (copy / DATA).mkdir()
            for name in (METADATA, MAIN):
                (os.rename if move else shutil.copyfile)(directory / DATA / name, copy / DATA / name)
        if manifest is None or added:
            _add_scores(copy, added)
            write_manifest(copy, target, dataset.env_id, facts)
    return find_dataset(target, root)


def _add_scores(directory: Path, scores: Mapping[str, float]) -> None:
    if scores:
        path = directory / DATA / METADATA
        write_bytes(path, json.dumps({**json.loads(path.read_bytes()), **scores}).encode())


def _read_settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the environment that Minari stored with the data."""
    try:
        spec = json.loads(metadata["env_spec"])
        kwargs, limit = spec.get("kwargs"), spec.get("max_episode_steps")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return {
        "env_kwargs": kwargs if isinstance(kwargs, dict) else {},
        "max_episode_steps": limit if type(limit) is int and limit > 0 else None,
    }


def _check_files(dataset: Dataset) -> None:
    """Raise `DatasetError` about a file that does not belong to a dataset."""
    known = {f"{DATA}/{METADATA}", f"{DATA}/{MAIN}", MANIFEST, INDEX}
    if extra := [name for name in list_files(dataset.path) if name not in known]:
        raise DatasetError("dataset", str(dataset.path), f"{extra[0]} does not belong to a dataset", "Remove it")
