"""The dataset of a CORL run: whether it fits the environment and the script, and the settings passed to the trainer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palaestra.errors import ConfigError
from palaestra.files.home import Home
from palaestra.runs.checkpoints.signature import find_incompatibilities
from palaestra.runs.process.interpreter import Probe
from palaestra.runs.process.probe import space_json
from palaestra.runs.runner import Finding
from palaestra.runs.spec import RunSpec
from palaestra.runs.wire import JsonObject

if TYPE_CHECKING:
    from palaestra.experience.datasets import Dataset
    from palaestra.experience.datasets.spaces import Space

VARIABLE = "PALAESTRA_OFFLINE"
"""Environment variable with which the modules in `shims/corl` find the dataset."""
MAX_SERIES_POINTS = 2_000
"""Values per loss that a run records, however long it is. Evaluations are recorded in addition."""
_DATA_FILE = "data/main_data.hdf5"
_LIST = "palaestra datasets list shows all; palaestra datasets create makes one"


@dataclass(frozen=True)
class OfflineData:
    """A verified dataset and the environment in which its policy is evaluated."""

    dataset: Dataset
    env_id: str
    env_kwargs: Mapping[str, object]
    max_episode_steps: int | None
    """The time limit of the episodes; None if it is that of the registered environment."""
    files: Mapping[str, str]
    """SHA-256 of the files that the trainer reads."""

    @property
    def action_range(self) -> tuple[list[float], list[float]] | None:
        """Bounds that are scaled to -1 … 1; None if that is the range of the actions."""
        low, high = _bounds(self.dataset.action_space)
        return None if set(low) == {-1.0} and set(high) == {1.0} else (low, high)

    @property
    def identity(self) -> JsonObject:
        """What a checkpoint remembers of the dataset that it learned from."""
        return {
            "dataset_id": self.dataset.dataset_id,
            "sha256": self.dataset.sha256,
            "env_id": self.env_id,
            "env_kwargs": dict(self.env_kwargs),
        }

    def build_settings(self, *, total_updates: int | None, metrics_every: int | None, wandb: bool) -> str:
        """The JSON text of `VARIABLE`."""
        every = metrics_every or max(1, -(-(total_updates or 1) // MAX_SERIES_POINTS))
        return json.dumps(
            {
                "dataset_id": self.dataset.dataset_id,
                "path": str(self.dataset.path),
                "data": _DATA_FILE,
                "files": dict(self.files),
                "env_kwargs": dict(self.env_kwargs),
                "max_episode_steps": self.max_episode_steps,
                "action_range": self.action_range,
                "random_score": self.dataset.random_score,
                "expert_score": self.dataset.expert_score,
                "metrics_every": every,
                "wandb": wandb,
            },
            sort_keys=True,
        )


def load_offline_data(spec: RunSpec) -> OfflineData:
    """Verify the dataset of a run, and that its spaces suit the scripts. Raises `ConfigError`."""
    from palaestra.experience.datasets import find_dataset
    from palaestra.experience.datasets.manifest import read_manifest

    name = spec.config.get("dataset")
    if not isinstance(name, str) or not name:
        reason = "no dataset given: the scripts of CORL learn from recorded transitions"
        raise ConfigError("dataset", name, reason, f"Add dataset=NAME; {_LIST}")
    directory = spec.invoked_from / Path(name).expanduser()
    dataset = find_dataset(str(directory) if (directory / "data").is_dir() else name, Home.default().datasets)
    env_id = spec.env_id or dataset.env_id
    if not env_id:
        reason = f"{dataset.dataset_id} does not name its environment, in which the policy is evaluated"
        raise ConfigError("env", None, reason, "Give it with --env")
    if dataset.env_id and env_id != dataset.env_id:
        reason = f"the dataset {dataset.dataset_id} was recorded in {dataset.env_id}, not in {env_id}"
        raise ConfigError("env", env_id, reason, f"Use --env {dataset.env_id}, or a dataset of {env_id}")
    _check_spaces(dataset)
    manifest = read_manifest(dataset.path)
    files = {} if manifest is None else {_DATA_FILE: manifest.files[_DATA_FILE].sha256}
    recorded = dataset.about.get("env_kwargs") or {}
    kwargs = {key: value for key, value in recorded.items() if key != "render_mode"}
    return OfflineData(dataset, env_id, kwargs, dataset.about.get("max_episode_steps"), files)


def _check_spaces(dataset: Dataset) -> None:
    actions, observations = dataset.action_space, dataset.observation_space
    if not _is_vector(actions):
        reason = f"its actions are {actions}, and the scripts of CORL need a vector of real numbers"
        remedy = "Use a dataset with continuous actions, or learn from this one with palaestra train (docs/offline.md)"
        raise ConfigError("dataset", dataset.dataset_id, reason, remedy)
    if not all(math.isfinite(bound) for bounds in _bounds(actions) for bound in bounds):
        reason = f"its actions {actions} have no bounds, and the scripts of CORL need them"
        raise ConfigError("dataset", dataset.dataset_id, reason, "Record it in an environment with bounded actions")
    if not _is_vector(observations):
        reason = f"its observations are {observations}, and the scripts of CORL need a vector"
        raise ConfigError("dataset", dataset.dataset_id, reason, "Record it with FlattenObservation")
    if dataset.total_steps < 2:
        raise ConfigError("dataset", dataset.dataset_id, "has fewer than 2 steps", "Record more")


def _is_vector(space: Space) -> bool:
    return type(space).__name__ == "Box" and len(space.shape or ()) == 1


def _bounds(space: Any) -> tuple[list[float], list[float]]:
    return [float(value) for value in space.low], [float(value) for value in space.high]


def read_settings(command: JsonObject) -> JsonObject | None:
    """The settings that a run passed to its trainer, from its command; None if it passed none."""
    environment = command.get("environment")
    try:
        settings = json.loads(environment[VARIABLE]) if isinstance(environment, Mapping) else None
    except (KeyError, ValueError, TypeError):
        return None
    return settings if isinstance(settings, dict) else None


def dataset_findings(data: OfflineData, probed: Probe) -> list[Finding]:
    """What the preflight says about the dataset, and whether the environment has its spaces."""
    dataset = data.dataset
    facts = f"{dataset.total_steps:,} steps, {dataset.total_episodes:,} episodes, sha256 {dataset.sha256[:12]}"
    findings = [Finding("dataset", "ok", f"{dataset.dataset_id}: {facts}")]
    if probed.env_signature:
        spaces = {"observation_space": dataset.observation_space, "action_space": dataset.action_space}
        recorded = {key: _without_details(key, space_json(space)) for key, space in spaces.items()}
        here = {key: _without_details(key, probed.env_signature.get(key) or {}) for key in spaces}
        if reasons := find_incompatibilities(recorded, here):
            text = f"{dataset.dataset_id} does not fit {data.env_id}: {'; '.join(reasons)}"
            findings.append(Finding("dataset", "refused", text, f"Use a dataset that was recorded in {data.env_id}"))
    if data.action_range is not None:
        low, high = data.action_range
        text = f"actions from {min(low):g} to {max(high):g} are scaled to -1 … 1, which the scripts assume"
        findings.append(Finding("actions", "ok", text))
    if dataset.random_score is None or dataset.expert_score is None:
        text = f"{dataset.dataset_id} has no reference scores: normalised scores are NaN"
        remedy = "Create it with reference scores (palaestra datasets create)"
        findings.append(Finding("scores", "warning", text, remedy))
    return findings


def _without_details(key: str, space: JsonObject) -> JsonObject:
    """A space without what no script reads: the bounds of observations, and the precision of numbers."""
    left_out = ("low", "high") if key == "observation_space" else ()
    description = {name: value for name, value in space.items() if name not in left_out}
    if str(space.get("dtype", "")).startswith("float"):
        description["dtype"] = "float"
    return description
