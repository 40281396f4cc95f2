"""The functions of D4RL that scripts of CORL call, fed by one local dataset in the format of Minari.

The run service names the dataset in the variable PALAESTRA_OFFLINE: its directory, the SHA-256 of its files, its
environment and its reference scores. A file whose hash differs is not read. Imports numpy and h5py only, so that it
works in the interpreter of the trainer. Python 3.8+.

D4RL drops the last transition of an episode that reached the time limit, because its files lack the observation after
it. Minari stores that observation, so that all transitions are kept here.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np

VARIABLE = "PALAESTRA_OFFLINE"
_BLOCK_BYTES = 1 << 20


@functools.lru_cache(maxsize=1)
def settings() -> Mapping[str, Any]:
    """What the run service says about the dataset and the run."""
    text = os.environ.get(VARIABLE)
    if not text:
        raise RuntimeError(f"{VARIABLE} is not set: this module works only in a run of palaestra")
    data: Mapping[str, Any] = json.loads(text)
    return data


def qlearning_dataset(env: Any, dataset: Any = None, terminate_on_end: bool = False, **_: Any) -> dict[str, Any]:
    """All transitions; the caller may change the arrays. `terminate_on_end` ends truncated episodes as well."""
    data = load_arrays() if dataset is None else dataset
    ends = data["terminals"] | data["timeouts"] if terminate_on_end else data["terminals"]
    names = ("observations", "actions", "next_observations", "rewards")
    return {**{name: np.array(data[name]) for name in names}, "terminals": np.array(ends)}


def get_normalized_score(env_name: str, score: Any) -> Any:
    """A return as a fraction of the way from a random policy to an expert; NaN if one is unknown or not better."""
    low, high = settings().get("random_score"), settings().get("expert_score")
    _last_returns[:] = [float(np.mean(score))]
    if low is None or high is None or high <= low:
        return np.asarray(score, dtype=np.float64) * float("nan")
    return (score - low) / (high - low)


def take_last_return() -> float | None:
    """The return that was normalised last, once. Scripts normalise a return directly before they log it."""
    return _last_returns.pop() if _last_returns else None


_last_returns: list[float] = []


@functools.lru_cache(maxsize=1)
def load_arrays() -> dict[str, Any]:
    """The transitions of all episodes in the order of the file, with actions scaled as `action_range` says."""
    root = settings()["path"]
    for name, sha256 in settings()["files"].items():
        if _hash_file(os.path.join(root, name)) != sha256:
            dataset_id = settings()["dataset_id"]
            raise RuntimeError(f"{name} of {dataset_id} was changed or damaged since the launch: its SHA-256 differs")
    with h5py.File(os.path.join(root, settings()["data"]), "r") as file:
        names = sorted((name for name in file if name.startswith("episode_")), key=lambda name: int(name[8:]))
        episodes = [_read_episode(file[name]) for name in names]
    arrays = {key: np.concatenate([episode[key] for episode in episodes]) for key in episodes[0]}
    low, high = action_range()
    if low is not None:
        arrays["actions"] = (2.0 * (arrays["actions"] - low) / (high - low) - 1.0).astype(np.float32)
    return arrays


def action_range() -> tuple[Any, Any]:
    """Bounds of the actions that are scaled to -1 … 1, or twice None if the environment has that range already."""
    bounds = settings().get("action_range")
    return (None, None) if bounds is None else (np.asarray(bounds[0], np.float32), np.asarray(bounds[1], np.float32))


def _read_episode(group: Any) -> dict[str, Any]:
    observations = np.asarray(group["observations"], np.float32)
    terminals = np.asarray(group["terminations"], np.bool_)
    timeouts = np.array(group["truncations"], np.bool_)
    # A collector may stop within an episode without saying so; its last step still ends it.
    timeouts[-1:] |= ~terminals[-1:]
    return {
        "observations": observations[:-1],
        "next_observations": observations[1:],
        "actions": np.asarray(group["actions"], np.float32),
        "rewards": np.asarray(group["rewards"], np.float32),
        "terminals": terminals,
        "timeouts": timeouts,
    }


def _hash_file(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(_BLOCK_BYTES), b""):
            digest.update(block)
    return digest.hexdigest()
