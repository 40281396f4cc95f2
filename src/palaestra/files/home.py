"""The state directory: where runs, imported checkpoints and the run service keep their files.

var/training/                     under $PALAESTRA_HOME, else under the current directory
    runs/<run_id>/                one run: `files.run_directory`
    registry.sqlite               what all runs are at a glance; can be rebuilt from the rest
    service/                      lock  token  endpoint.json  service.log     (directory mode 0700)
    checkpoints/<id>/             imported or deployed ones        deployed/<env>.json     which one acts where
    archive/<run_id>.tar.gz       packed runs                      trash/<run_id>.<time>/  deleted ones
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from palaestra.files.run_directory import RunDirectory

__all__ = ["Home"]


@dataclass(frozen=True)
class Home:
    """The state directory, `var/training`."""

    path: Path

    @classmethod
    def default(cls) -> Home:
        """Under `$PALAESTRA_HOME`, else under the current directory."""
        return cls(Path(os.environ.get("PALAESTRA_HOME") or Path.cwd()).resolve() / "var" / "training")

    @property
    def base(self) -> Path:
        """What `$PALAESTRA_HOME` must be for a child to find the same place."""
        return self.path.parent.parent

    @property
    def runs(self) -> Path:
        """Every run's directory."""
        return self.path / "runs"

    @property
    def registry(self) -> Path:
        """The SQLite file."""
        return self.path / "registry.sqlite"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints that were imported, or copied when they were deployed."""
        return self.path / "checkpoints"

    @property
    def deployed(self) -> Path:
        """Which checkpoint acts in which environment."""
        return self.path / "deployed"

    @property
    def archive(self) -> Path:
        """Packed runs."""
        return self.path / "archive"

    @property
    def trash(self) -> Path:
        """Deleted runs, until they are purged."""
        return self.path / "trash"

    @property
    def service(self) -> Path:
        """The service's own files; mode 0700."""
        return self.path / "service"

    @property
    def lock(self) -> Path:
        """Held by the one service, with its identity inside."""
        return self.service / "lock"

    @property
    def token(self) -> Path:
        """What clients must send; mode 0600."""
        return self.service / "token"

    @property
    def endpoint(self) -> Path:
        """Where the service answers."""
        return self.service / "endpoint.json"

    def run(self, run_id: str) -> RunDirectory:
        """The directory of one run, existing or not. The id must have been checked."""
        return RunDirectory(self.runs / run_id)
