"""The directory of a run and of its attempts: file names, run ids, and finding a run or a checkpoint.

    <run_id>/
        config.yaml      as given        resolved.json   all values         command.json   command line
        spec.json        specification for the run service                  events.jsonl   phase changes of the run
        attempt_1/
            metrics.jsonl                the journal         resolved.json, command.json   of this attempt
            checkpoints/update_00000120/ `files.checkpoint`  checkpoints/best.json         name of the best one
            trajectories/                screen episodes     trajectories/learned.jsonl    credit of their turns
            plan.json, launch.json, process.json, stop.json, exit.json, remote.json, stdout.log, system.jsonl,
            log.jsonl, source/, series/, videos/, work/, tmp/      of the run service

spec.json and the last two lines exist only for runs of the run service; of other runs, events.jsonl holds what people
changed about them. A resume adds an attempt; nothing is reused.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from palaestra.errors import CheckpointError, ConfigError, PalaestraError, UnknownRun
from palaestra.files.atomic import atomic_directory, write_json, write_text
from palaestra.files.checkpoint import FOREIGN_REMEDY, MANIFEST, is_intact, list_checkpoints
from palaestra.redaction import redact_command, redact_environment

_RELEVANT = re.compile(r"^(PALAESTRA|OMP|MKL|OPENBLAS|NUMBA|CUDA|PYTHON|WANDB|MUJOCO|SDL|QT|XDG_CACHE)", re.IGNORECASE)
"""Environment variables that can affect a run."""

_RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,89}")
_MAX_STEM_LENGTH = 63

_T = TypeVar("_T")


class PathIn:
    """A class attribute that is a path inside the directory `self.path`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, directory: Any, owner: type | None = None) -> Path:
        path: Path = directory.path
        return path / self._name


@dataclass(frozen=True)
class Attempt:
    """One start of a run."""

    path: Path

    resolved = PathIn("resolved.json")
    """The configuration with all values."""
    command = PathIn("command.json")
    """The command line, with secrets redacted."""
    journal = PathIn("metrics.jsonl")
    """The events, written by the trainer or translated by the run service."""
    checkpoints = PathIn("checkpoints")
    best = PathIn("checkpoints/best.json")
    """Name and score of the best checkpoint."""
    trajectories = PathIn("trajectories")
    """Screen episodes."""
    tensorboard = PathIn("tensorboard")
    videos = PathIn("videos")
    """Videos and their reports."""
    work = PathIn("work")
    """Current directory of the trainer."""
    scratch = PathIn("tmp")
    """TMPDIR of the trainer; removed when it has ended."""
    plan = PathIn("plan.json")
    """Where the run service finds the files of the trainer."""
    launch = PathIn("launch.json")
    """What the watchdog starts; removed after the start."""
    process = PathIn("process.json")
    """Process ids of watchdog and trainer."""
    stop = PathIn("stop.json")
    """The request to stop, if any."""
    remote = PathIn("remote.json")
    """The machine on which the attempt runs, if it is another one."""
    exit = PathIn("exit.json")
    """Exit status, written by the watchdog."""
    stdout = PathIn("stdout.log")
    """Output of the trainer."""
    log = PathIn("log.jsonl")
    """Events that a program reports with `palaestra.log`."""
    source = PathIn("source")
    """The code and the environment that it ran with."""
    system = PathIn("system.jsonl")
    """Samples of CPU, memory and GPU use."""
    series = PathIn("series")
    """The numbers of the journal by metric; can be rebuilt from it."""

    @property
    def number(self) -> int:
        """The number of the attempt, from 1."""
        return int(self.path.name.removeprefix("attempt_"))


@dataclass(frozen=True)
class RunDirectory:
    """The directory of one run."""

    path: Path

    config = PathIn("config.yaml")
    """The configuration as given."""
    resolved = PathIn("resolved.json")
    """The configuration with all values."""
    command = PathIn("command.json")
    """The command line of the first attempt, with secrets redacted."""
    spec = PathIn("spec.json")
    """The specification for the run service; missing if `palaestra train` was run directly."""
    events = PathIn("events.jsonl")
    """The phase changes, alarms and notes of the run."""
    tensorboard = PathIn("tensorboard")
    """Event files made from the journals of all attempts."""

    @property
    def run_id(self) -> str:
        """The name of the directory."""
        return self.path.name

    @property
    def is_supervised(self) -> bool:
        """Whether the run service started the run; then only the service resumes it."""
        return self.spec.is_file()

    @property
    def resume_command(self) -> str:
        """The command that resumes the run."""
        return f"palaestra {'runs resume' if self.is_supervised else 'train --resume'} {self.run_id}"

    def add_resume_hint(self, error: BaseException, checkpoint: Path | None) -> str:
        """Add the checkpoint and the command to resume from to an error; returns the whole message."""
        is_ours = isinstance(error, PalaestraError)
        message = str(error) if is_ours else f"{type(error).__name__}: {error}".removesuffix(": ")
        if checkpoint is None:
            return message
        hint = f"The last good state is {checkpoint}. Resume with: {self.resume_command}"
        if is_ours and len(error.args) == 1:
            error.args = (f"{message.rstrip('.')}. {hint}",)
            return str(error)
        error.add_note(hint)
        return f"{message.rstrip('.')}. {hint}"

    # ------------------------------------------------------------------ directory and finding runs

    @classmethod
    def create(
        cls,
        root: Path,
        run_id: str,
        given: str | None,
        resolved: Mapping[str, Any],
        spec: Mapping[str, Any] | None = None,
    ) -> RunDirectory:
        """Create a new run with its configuration, durably."""
        run = cls(root / run_id)
        if run.path.exists():
            raise FileExistsError(f"{run.path} exists already")
        try:
            with atomic_directory(run.path) as directory:
                if spec is not None:
                    write_json(directory / run.spec.name, spec, durable=False)
                if given is not None:
                    write_text(directory / run.config.name, given, durable=False)
                write_json(directory / run.resolved.name, resolved, durable=False)
        except OSError as error:
            raise ConfigError(
                "runs directory", str(root), f"cannot be written ({error.strerror})", "Set PALAESTRA_HOME elsewhere"
            ) from None
        return run

    @classmethod
    def find(cls, name: str, root: Path) -> RunDirectory:
        """Find a run by path, by id, or by a unique prefix of its id."""
        if not name:
            raise ConfigError("run", name, "no run given", "Give its id or directory")
        path = Path(name)
        if (path / "resolved.json").is_file():
            return cls(path.resolve())
        known = sorted(p.parent.name for p in root.glob("[!.]*/resolved.json"))
        matches = [name] if name in known else [run_id for run_id in known if run_id.startswith(name)]
        if len(matches) == 1:
            return cls(root / matches[0])
        if len(matches) > 1:
            raise ConfigError(
                "run", name, f"is the prefix of several runs ({', '.join(matches[:4])})", "Write more of the id"
            )
        from palaestra.config import closest_names  # loads pydantic, which is slow for listing runs

        close = closest_names(name, known)
        remedy = f"Nearest: {', '.join(close)}" if close else _describe_runs(known, root)
        raise ConfigError("run", name, "no such run", remedy)

    def read_config(self) -> dict[str, Any]:
        """The configuration of the newest attempt, with all values."""
        attempts = self.attempts()
        return _read_json(attempts[-1].resolved if attempts else self.resolved)

    # ------------------------------------------------------------------ attempts

    def attempt(self, number: int) -> Attempt:
        """The directory of one attempt, which need not exist."""
        return Attempt(self.path / f"attempt_{number}")

    def attempts(self) -> list[Attempt]:
        """The existing attempts, oldest first."""
        attempts = [Attempt(p) for p in self.path.glob("attempt_*") if p.name.removeprefix("attempt_").isdecimal()]
        return sorted(attempts, key=lambda attempt: attempt.number)

    def new_attempt(self, argv: Sequence[str], resolved: Mapping[str, Any]) -> Attempt:
        """Create the next attempt, with the command line that started it."""
        attempt = self.attempt(1 + max((attempt.number for attempt in self.attempts()), default=0))
        attempt.checkpoints.mkdir(parents=True)
        environment = {key: value for key, value in redact_environment(os.environ).items() if _RELEVANT.match(key)}
        command = {"argv": redact_command(argv), "environment": environment}
        write_json(attempt.command, command)
        write_json(attempt.resolved, resolved)
        if attempt.number == 1:
            write_json(self.command, command)
        return attempt

    def use_prepared_attempt(self, attempt: Attempt, resolved: Mapping[str, Any]) -> None:
        """Use an attempt that the run service prepared, including its command.json."""
        if attempt.path.parent != self.path or not attempt.path.is_dir():
            raise ConfigError("--into", str(attempt.path), "no such attempt of this run", "The run service prepares it")
        attempt.checkpoints.mkdir(exist_ok=True)
        write_json(attempt.resolved, resolved)
        write_json(self.resolved, resolved)

    # ------------------------------------------------------------------ checkpoints

    def latest_checkpoint(self) -> Path:
        """The newest checkpoint of the newest attempt that has one."""
        for attempt in reversed(self.attempts()):
            checkpoints = list_checkpoints(attempt.checkpoints)
            if checkpoints:
                return checkpoints[-1]
        raise CheckpointError("run", self.run_id, "has no checkpoint", "Start a new run")

    def all_checkpoints(self) -> list[Path]:
        """The checkpoints of all attempts, newest first."""
        return [
            path for attempt in reversed(self.attempts()) for path in reversed(list_checkpoints(attempt.checkpoints))
        ]

    def load_checkpoint(self, load: Callable[[Path], _T], chosen: Path | None = None) -> _T:
        """Load the newest or the chosen checkpoint; the error for a damaged one has the command for an intact one."""
        path = chosen or self.latest_checkpoint()
        try:
            return load(path)
        except CheckpointError as error:
            if is_intact(path):
                raise  # it does not match, and neither would an earlier one
            earlier = self.newest_intact_checkpoint()
            if earlier is None:
                remedy = "No checkpoint of the run is intact: start it again"
            else:
                name = earlier.name if self.get_checkpoint(earlier.name) == earlier else str(earlier)
                remedy = f"Resume from the newest intact one: {self.resume_command} --checkpoint {name}"
            raise CheckpointError(error.place, error.value, error.reason, remedy) from None

    def newest_intact_checkpoint(self) -> Path | None:
        """The newest checkpoint that is intact."""
        return next(filter(is_intact, self.all_checkpoints()), None)

    def get_checkpoint(self, name: str) -> Path:
        """A checkpoint by path or directory name; of several, the newest."""
        if (Path(name) / MANIFEST).is_file():
            return Path(name).resolve()
        known = self.all_checkpoints()
        for path in known:
            if path.name == name:
                return path
        remedy = f"It has {', '.join(path.name for path in known[:5])}" if known else "Start a new run"
        raise CheckpointError("--checkpoint", name, f"run {self.run_id} has no such checkpoint", remedy)

    def best_checkpoint(self) -> Path | None:
        """The checkpoint with the best score, if any has one."""
        scored = []
        for attempt in self.attempts():
            if attempt.best.is_file():
                entry = _read_json(attempt.best)
                path = attempt.checkpoints / entry["checkpoint"]
                if (path / MANIFEST).is_file():
                    scored.append((float(entry["score"]), path))
        return max(scored)[1] if scored else None


def new_run_id(stem: str) -> str:
    """A unique, readable run id that sorts by time."""
    readable = re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")[:_MAX_STEM_LENGTH] or "run"
    return f"{readable}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def check_run_id(text: str) -> str:
    """Return the id; `UnknownRun` if it cannot be the name of a run directory."""
    if not _RUN_ID.fullmatch(text) or ".." in text:
        raise UnknownRun("run", text, "is not the id of a run", "palaestra runs list shows them")
    return text


def start_attempt(
    resolved: Mapping[str, Any],
    *,
    root: Path,
    run_id: str,
    given: str,
    argv: Sequence[str],
    resume: RunDirectory | None,
    into: Attempt | None,
) -> tuple[RunDirectory, Attempt]:
    """The run and attempt to write to: prepared ones, the next attempt of a resumed run, or the first of a new run."""
    if into is not None:
        run = RunDirectory(into.path.parent)
        run.use_prepared_attempt(into, resolved)
        return run, into
    run = resume or RunDirectory.create(root, run_id, given, resolved)
    return run, run.new_attempt(argv, resolved)


def find_checkpoint(name: str, root: Path, *, which: str = "best") -> Path:
    """A checkpoint by path, or the best or latest one of a run."""
    path = Path(name)
    if (path / MANIFEST).is_file() or path.name.startswith("update_"):
        return path
    run = RunDirectory.find(name, root)
    runner = _read_json(run.spec).get("runner", "palaestra") if run.spec.exists() else "palaestra"
    if runner != "palaestra":
        raise CheckpointError("run", run.run_id, f"is a run of {runner}, not of palaestra", FOREIGN_REMEDY)
    path = (run.best_checkpoint() if which == "best" else None) or run.latest_checkpoint()
    if not is_intact(path):
        other = run.newest_intact_checkpoint()
        remedy = "No checkpoint of the run is intact" if other is None else f"The newest intact one is {other}"
        raise CheckpointError("checkpoint", str(path), f"the {which} checkpoint of run {run.run_id} is damaged", remedy)
    return path


def _describe_runs(run_ids: Sequence[str], root: Path) -> str:
    """How many runs there are, and the ids of those that began or were continued last."""

    def modification_time(run_id: str) -> float:
        try:
            return (root / run_id / "resolved.json").stat().st_mtime
        except OSError:  # deleted meanwhile
            return 0.0

    count = "is 1 run" if len(run_ids) == 1 else f"are {len(run_ids)} runs"
    newest = sorted(run_ids, key=modification_time, reverse=True)[:3]
    return f"There {count} under {root}" + (f", the newest: {', '.join(newest)}" if newest else "")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"it is a {type(data).__name__}, not an object")
    except (OSError, ValueError) as error:
        raise CheckpointError("run file", str(path), f"cannot be read ({error})", "Name a checkpoint instead") from None
    return data
