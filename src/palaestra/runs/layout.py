"""Where everything is: the state directory of the service, and the files of a run and of its attempts.

var/training/                     under $PALAESTRA_HOME, else under the current directory
    registry.sqlite               what all runs are at a glance; can be rebuilt from the rest
    service/                      lock  token  endpoint.json  service.log     (directory mode 0700)
    runs/<run_id>/                one run
    checkpoints/<id>/             imported ones        archive/<run_id>.tar.gz     trash/<run_id>.<time>/
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["AttemptPaths", "Home", "RunPaths"]


@dataclass(frozen=True)
class AttemptPaths:
    """One start of a run."""

    path: Path

    @property
    def number(self) -> int:
        """Counted from 1."""
        return int(self.path.name.removeprefix("attempt_"))

    @property
    def work(self) -> Path:
        """The trainer's current directory."""
        return self.path / "work"

    @property
    def scratch(self) -> Path:
        """Its TMPDIR; gone when it has ended."""
        return self.path / "tmp"

    @property
    def command(self) -> Path:
        """The plan as shown."""
        return self.path / "command.json"

    @property
    def process(self) -> Path:
        """Who warden and trainer are."""
        return self.path / "process.json"

    @property
    def stop(self) -> Path:
        """The request to end it, when there was one."""
        return self.path / "stop.json"

    @property
    def exit(self) -> Path:
        """How it ended, as its warden saw it."""
        return self.path / "exit.json"

    @property
    def stdout(self) -> Path:
        """Everything it printed."""
        return self.path / "stdout.log"

    @property
    def journal(self) -> Path:
        """Its events, written by itself or translated by us."""
        return self.path / "metrics.jsonl"

    @property
    def series(self) -> Path:
        """The same numbers by metric; can be rebuilt from the journal."""
        return self.path / "series"

    @property
    def videos(self) -> Path:
        """Clips and their reports."""
        return self.path / "videos"


@dataclass(frozen=True)
class RunPaths:
    """One run."""

    path: Path

    @property
    def run_id(self) -> str:
        """The directory's name."""
        return self.path.name

    @property
    def spec(self) -> Path:
        """What was asked for; a directory without it was made by `palaestra train` alone."""
        return self.path / "spec.json"

    @property
    def life(self) -> Path:
        """What happened to the run."""
        return self.path / "life.jsonl"

    def attempt(self, number: int) -> AttemptPaths:
        """The paths of one attempt, existing or not."""
        return AttemptPaths(self.path / f"attempt_{number}")

    def attempts(self) -> list[AttemptPaths]:
        """Those that exist, oldest first."""
        found = [AttemptPaths(p) for p in self.path.glob("attempt_*") if p.name.removeprefix("attempt_").isdecimal()]
        return sorted(found, key=lambda attempt: attempt.number)


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

    def run(self, run_id: str) -> RunPaths:
        """The paths of one run, existing or not. The id must have been validated."""
        return RunPaths(self.runs / run_id)
