"""The directory of a run and of its attempts: where each file is, and finding a run or a checkpoint again.

    <run_id>/
        config.yaml      as given        resolved.json   every value        command.json   what was started
        spec.json        what the run service was asked for                 life.jsonl     what happened to the run
        attempt_1/
            metrics.jsonl                the journal         resolved.json, command.json   of this attempt
            checkpoints/update_00000120/ `files.checkpoint`  checkpoints/best.json         which one scored best
            trajectories/                episodes on screens
            plan.json, launch.json, process.json, stop.json, exit.json, stdout.log, system.jsonl, series/, videos/,
            work/, tmp/                  of the run service

spec.json, life.jsonl and the last two lines exist only for runs of the run service. A resume adds an attempt; nothing
is reused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from palaestra.errors import CheckpointError, ConfigError, PalaestraError
from palaestra.files.atomic import new_directory, write_json, write_text
from palaestra.files.checkpoint import MANIFEST, checkpoints_in, is_whole
from palaestra.redaction import redact_command, redact_environment

__all__ = ["Attempt", "RunDirectory", "begin_attempt", "find_checkpoint"]

_RELEVANT = re.compile(r"^(PALAESTRA|OMP|MKL|OPENBLAS|NUMBA|CUDA|PYTHON|WANDB|MUJOCO|SDL|QT|XDG_CACHE)", re.IGNORECASE)
"""Variables that can change a run."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Attempt:
    """One start of a run."""

    path: Path

    @property
    def number(self) -> int:
        """Counted from 1."""
        return int(self.path.name.removeprefix("attempt_"))

    @property
    def resolved(self) -> Path:
        """Its configuration, every value."""
        return self.path / "resolved.json"

    @property
    def command(self) -> Path:
        """What was started, secrets hidden."""
        return self.path / "command.json"

    @property
    def journal(self) -> Path:
        """Its events, written by itself or translated by the run service."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Its checkpoints."""
        return self.path / "checkpoints"

    @property
    def best(self) -> Path:
        """Which checkpoint scored best."""
        return self.checkpoints / "best.json"

    @property
    def trajectories(self) -> Path:
        """Episodes on screens."""
        return self.path / "trajectories"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.path / "tensorboard"

    @property
    def videos(self) -> Path:
        """Clips and their reports."""
        return self.path / "videos"

    @property
    def work(self) -> Path:
        """The trainer's current directory."""
        return self.path / "work"

    @property
    def scratch(self) -> Path:
        """Its TMPDIR; removed when it has ended."""
        return self.path / "tmp"

    @property
    def plan(self) -> Path:
        """What the run service knows of the trainer's files."""
        return self.path / "plan.json"

    @property
    def launch(self) -> Path:
        """What the watchdog starts; removed once it has started."""
        return self.path / "launch.json"

    @property
    def process(self) -> Path:
        """Process ids of watchdog and trainer."""
        return self.path / "process.json"

    @property
    def stop(self) -> Path:
        """The request to end it, when there was one."""
        return self.path / "stop.json"

    @property
    def exit(self) -> Path:
        """How the attempt ended, written by the watchdog."""
        return self.path / "exit.json"

    @property
    def stdout(self) -> Path:
        """Everything it printed."""
        return self.path / "stdout.log"

    @property
    def system(self) -> Path:
        """Samples of processor, memory and GPU use."""
        return self.path / "system.jsonl"

    @property
    def series(self) -> Path:
        """The journal's numbers by metric; can be rebuilt from it."""
        return self.path / "series"


@dataclass(frozen=True)
class RunDirectory:
    """One run."""

    path: Path

    @property
    def run_id(self) -> str:
        """The directory's name."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The configuration as given."""
        return self.path / "config.yaml"

    @property
    def resolved(self) -> Path:
        """The configuration, every value."""
        return self.path / "resolved.json"

    @property
    def command(self) -> Path:
        """What the first attempt started, secrets hidden."""
        return self.path / "command.json"

    @property
    def spec(self) -> Path:
        """What the run service was asked for; a directory without it was made by `palaestra train` alone."""
        return self.path / "spec.json"

    @property
    def life(self) -> Path:
        """What happened to the run."""
        return self.path / "life.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Event files made from the journals of all attempts."""
        return self.path / "tensorboard"

    @property
    def supervised(self) -> bool:
        """Whether the run service started it; only the service resumes it."""
        return self.spec.is_file()

    @property
    def resume_command(self) -> str:
        """What to type to have it go on."""
        return f"palaestra {'runs resume' if self.supervised else 'train --resume'} {self.run_id}"

    def add_resume_hint(self, error: BaseException, checkpoint: Path | None) -> str:
        """Add to what ended a run where it can be taken up again and with which command; returns the whole message."""
        named = isinstance(error, PalaestraError)
        message = str(error) if named else f"{type(error).__name__}: {error}".removesuffix(": ")
        if checkpoint is None:
            return message
        hint = f"The last good state is {checkpoint}. Resume with: {self.resume_command}"
        if named and len(error.args) == 1:
            error.args = (f"{message.rstrip('.')}. {hint}",)
            return str(error)
        error.add_note(hint)
        return f"{message.rstrip('.')}. {hint}"

    # ------------------------------------------------------------------ making and finding runs

    @classmethod
    def create(
        cls,
        root: Path,
        run_id: str,
        given: str | None,
        resolved: Mapping[str, Any],
        spec: Mapping[str, Any] | None = None,
    ) -> RunDirectory:
        """A new run with its configuration written down, on the disk when this returns."""
        run = cls(root / run_id)
        if run.path.exists():
            raise FileExistsError(f"{run.path} exists already")
        try:
            with new_directory(run.path) as making:
                if spec is not None:
                    write_json(making / run.spec.name, spec, durable=False)
                if given is not None:
                    write_text(making / run.config.name, given, durable=False)
                write_json(making / run.resolved.name, resolved, durable=False)
        except OSError as error:
            raise ConfigError(
                "runs directory", str(root), f"cannot be written ({error.strerror})", "Set PALAESTRA_HOME elsewhere"
            ) from None
        return run

    @classmethod
    def find(cls, name: str, root: Path) -> RunDirectory:
        """By path, by id, or by the unique beginning of an id."""
        if not name:
            raise ConfigError("run", name, "no run named", "Give its id or directory")
        path = Path(name)
        if (path / "resolved.json").is_file():
            return cls(path.resolve())
        known = sorted(p.parent.name for p in root.glob("[!.]*/resolved.json"))
        matches = [name] if name in known else [run_id for run_id in known if run_id.startswith(name)]
        if len(matches) == 1:
            return cls(root / matches[0])
        if len(matches) > 1:
            raise ConfigError("run", name, f"several runs begin so ({', '.join(matches[:4])})", "Write more of the id")
        from palaestra.config import closest_names  # loads pydantic, which listing runs must not

        close = closest_names(name, known)
        remedy = f"Nearest: {', '.join(close)}" if close else f"There are {len(known)} runs under {root}"
        raise ConfigError("run", name, "no such run", remedy)

    def read_config(self) -> dict[str, Any]:
        """The configuration of the newest attempt, every value."""
        attempts = self.attempts()
        return _read_json(attempts[-1].resolved if attempts else self.resolved)

    # ------------------------------------------------------------------ attempts

    def attempt(self, number: int) -> Attempt:
        """One attempt, existing or not."""
        return Attempt(self.path / f"attempt_{number}")

    def attempts(self) -> list[Attempt]:
        """Those that exist, oldest first."""
        found = [Attempt(p) for p in self.path.glob("attempt_*") if p.name.removeprefix("attempt_").isdecimal()]
        return sorted(found, key=lambda attempt: attempt.number)

    def new_attempt(self, argv: Sequence[str], resolved: Mapping[str, Any]) -> Attempt:
        """The next attempt, with the command that started it."""
        attempt = self.attempt(1 + max((attempt.number for attempt in self.attempts()), default=0))
        attempt.checkpoints.mkdir(parents=True)
        environment = {key: value for key, value in redact_environment(os.environ).items() if _RELEVANT.match(key)}
        command = {"argv": redact_command(argv), "environment": environment}
        write_json(attempt.command, command)
        write_json(attempt.resolved, resolved)
        if attempt.number == 1:
            write_json(self.command, command)
        return attempt

    def fill_attempt(self, attempt: Attempt, resolved: Mapping[str, Any]) -> None:
        """Use an attempt that the run service prepared; it wrote down the command itself."""
        if attempt.path.parent != self.path or not attempt.path.is_dir():
            raise ConfigError("--into", str(attempt.path), "no such attempt of this run", "The run service prepares it")
        attempt.checkpoints.mkdir(exist_ok=True)
        write_json(attempt.resolved, resolved)
        write_json(self.resolved, resolved)

    # ------------------------------------------------------------------ checkpoints

    def latest_checkpoint(self) -> Path:
        """The newest of the newest attempt that has any."""
        for attempt in reversed(self.attempts()):
            found = checkpoints_in(attempt.checkpoints)
            if found:
                return found[-1]
        raise CheckpointError("run", self.run_id, "has no checkpoint", "Start it anew")

    def all_checkpoints(self) -> list[Path]:
        """Newest first, over all attempts."""
        return [path for attempt in reversed(self.attempts()) for path in reversed(checkpoints_in(attempt.checkpoints))]

    def load_checkpoint(self, load: Callable[[Path], _T], chosen: Path | None = None) -> _T:
        """Have `load` read the newest checkpoint, or the chosen one; for a damaged one name the command for another."""
        path = chosen or self.latest_checkpoint()
        try:
            return load(path)
        except CheckpointError as error:
            if is_whole(path):
                raise  # it does not fit, and an earlier one would not either
            earlier = self.newest_whole()
            if earlier is None:
                remedy = "No checkpoint of the run is whole: start it anew"
            else:
                name = earlier.name if self.checkpoint_named(earlier.name) == earlier else str(earlier)
                remedy = f"Go on from the newest one that is whole: {self.resume_command} --checkpoint {name}"
            raise CheckpointError(error.place, error.value, error.reason, remedy) from None

    def newest_whole(self) -> Path | None:
        """The newest checkpoint that is not damaged."""
        return next(filter(is_whole, self.all_checkpoints()), None)

    def checkpoint_named(self, name: str) -> Path:
        """One of the run's checkpoints, by its path or by the name of its directory; of several, the newest."""
        if (Path(name) / MANIFEST).is_file():
            return Path(name).resolve()
        known = self.all_checkpoints()
        for path in known:
            if path.name == name:
                return path
        remedy = f"It has {', '.join(path.name for path in known[:5])}" if known else "Start it anew"
        raise CheckpointError("--checkpoint", name, f"run {self.run_id} has no such checkpoint", remedy)

    def best_checkpoint(self) -> Path | None:
        """The one with the best score so far, if any was scored."""
        scored = []
        for attempt in self.attempts():
            if attempt.best.is_file():
                fact = _read_json(attempt.best)
                path = attempt.checkpoints / fact["checkpoint"]
                if (path / MANIFEST).is_file():
                    scored.append((float(fact["score"]), path))
        return max(scored)[1] if scored else None


def begin_attempt(
    resolved: Mapping[str, Any],
    *,
    root: Path,
    run_id: str,
    given: str,
    argv: Sequence[str],
    resume: RunDirectory | None,
    into: Attempt | None,
) -> tuple[RunDirectory, Attempt]:
    """The run and the attempt to write to: prepared ones, the next of a run that goes on, or the first of a new one."""
    if into is not None:
        run = RunDirectory(into.path.parent)
        run.fill_attempt(into, resolved)
        return run, into
    run = resume or RunDirectory.create(root, run_id, given, resolved)
    return run, run.new_attempt(argv, resolved)


def find_checkpoint(name: str, root: Path, *, which: str = "best") -> Path:
    """A checkpoint by its own path, or the best or latest of a run."""
    path = Path(name)
    if (path / MANIFEST).is_file() or path.name.startswith("update_"):
        return path
    run = RunDirectory.find(name, root)
    path = (run.best_checkpoint() if which == "best" else None) or run.latest_checkpoint()
    if not is_whole(path):
        other = run.newest_whole()
        remedy = "No checkpoint of the run is whole" if other is None else f"The newest one that is whole is {other}"
        raise CheckpointError("checkpoint", str(path), f"the {which} one of run {run.run_id} is damaged", remedy)
    return path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError(f"it holds a {type(data).__name__}, not an object")
    except (OSError, ValueError) as error:
        raise CheckpointError("run file", str(path), f"cannot be read ({error})", "Name a checkpoint instead") from None
    return data
