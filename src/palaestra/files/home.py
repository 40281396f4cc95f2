"""The state directory, where runs, imported checkpoints and the run service have their files.

var/training/                     under $PALAESTRA_HOME, else under the current directory
    runs/<run_id>/                one run: `files.run_directory`
    registry.sqlite               index of all runs; can be rebuilt from the rest
    service/                      lock  token  endpoint.json  service.log     (directory mode 0700)
    checkpoints/<id>/             imported or deployed ones        deployed/<env>.json     deployed checkpoint
    archive/<run_id>.tar.gz       archived runs                    trash/<run_id>.<time>/  deleted runs
    episodes/<episode_id>/        recorded episodes of plays       presets/<kind>/<name>.json     values of forms
    datasets/<dataset_id>/        offline data in Minari's layout: `experience.datasets`
    sweeps/<sweep_id>/            sweep.json  trials.jsonl         optuna.journal          of sweeps that use Optuna
    environments/<name>-<digest>/ Python environments of runners    custom/<runner>/<name>/ checkpoints kept by name
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from palaestra.errors import ConfigError
from palaestra.files.run_directory import PathIn, RunDirectory


@dataclass(frozen=True)
class Home:
    """The state directory, `var/training`."""

    path: Path

    runs = PathIn("runs")
    registry = PathIn("registry.sqlite")
    checkpoints = PathIn("checkpoints")
    """Imported checkpoints, and copies of deployed ones."""
    deployed = PathIn("deployed")
    """The deployed checkpoint of each environment."""
    archive = PathIn("archive")
    """Archived runs."""
    trash = PathIn("trash")
    """Deleted runs, until they are purged."""
    episodes = PathIn("episodes")
    """Recorded episodes of plays."""
    datasets = PathIn("datasets")
    """Datasets to learn from, in the layout of Minari."""
    presets = PathIn("presets")
    """Named values of forms."""
    sweeps = PathIn("sweeps")
    """Sweeps: their specs and trials."""
    optuna = PathIn("optuna.journal")
    """Optuna's storage of the sweeps that use it; can be rebuilt from their trials."""
    environments = PathIn("environments")
    """Python environments that runners create."""
    custom = PathIn("custom")
    """Checkpoints that runners keep by name."""
    service = PathIn("service")
    """Files of the run service; mode 0700."""
    lock = PathIn("service/lock")
    """Locked by the running service; holds its identity."""
    token = PathIn("service/token")
    """The bearer token of clients; mode 0600."""
    endpoint = PathIn("service/endpoint.json")
    """URL of the service."""

    @classmethod
    def default(cls) -> Home:
        """Under `$PALAESTRA_HOME`, else under the current directory; `ConfigError` if a file is in the way."""
        path = Path(os.environ.get("PALAESTRA_HOME") or Path.cwd()).resolve() / "var" / "training"
        existing = next(place for place in (path, *path.parents) if os.path.lexists(place))
        if not existing.is_dir():
            reason = f"{existing} is not a directory"
            raise ConfigError("state directory", str(path), reason, "Set PALAESTRA_HOME to a directory")
        return cls(path)

    @property
    def base(self) -> Path:
        """The value of `$PALAESTRA_HOME` with which a child process finds this directory."""
        return self.path.parent.parent

    def run(self, run_id: str) -> RunDirectory:
        """The directory of one run, which need not exist. The id must have been checked."""
        return RunDirectory(self.runs / run_id)
