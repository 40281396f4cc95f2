"""The files of an attempt: its stored plan, its processes, how it ended, what it printed and reported last.

Imports nothing heavy: `palaestra runs list` reads the status of every live run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from palaestra.files.atomic import read_json, write_json
from palaestra.files.run_directory import Attempt
from palaestra.processes.procfs import ProcessIdentity, boot_id
from palaestra.runs.phase import ExitFacts
from palaestra.runs.runner import (
    EventFiles,
    JournalFile,
    LaunchPlan,
    LogFile,
    NewEventFiles,
    ProgramOutput,
    Source,
    StdoutLines,
)
from palaestra.runs.wire import JsonObject, from_damaged_json, upgrade_names

LABEL_VARIABLE = "PALAESTRA_RUN"
"""The environment variable that holds the label of an attempt in all of its processes."""

SUPPORTED_SCHEMA = 1
SHOWN_LINES = 20
_TAIL_BYTES = 1 << 16
_JOURNAL_TAIL_BYTES = 1 << 18
_TRACEBACK = "Traceback (most recent call last):"
_NOT_FATAL = ("Exception ignored in", "Exception in thread", "Error in atexit")
"""Lines before a traceback that did not end the program."""
_MAX_LINES_AFTER_TRACEBACK = 20
"""A program that prints more than this after a traceback ended for another reason. W&B's summary is not counted."""
_SOURCES: dict[str, type[Source]] = {
    "journal": JournalFile,
    "stdout": StdoutLines,
    "tensorboard": EventFiles,
    "log": LogFile,
    "new_event_files": NewEventFiles,
    "program_output": ProgramOutput,
}


@dataclass(frozen=True)
class AttemptPlan:
    """The stored part of a `LaunchPlan`; holds no environment variables."""

    sources: tuple[Source, ...] = ()
    checkpoints: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()
    stop_grace_s: float = 10.0
    env_id: str = ""
    algorithm: str = ""
    total_steps: int | None = None
    env_signature: JsonObject = field(default_factory=dict)
    script_sha256: str = ""
    gpus: tuple[str, ...] = ()
    """GPUs leased to the attempt."""
    record_video: bool = False
    offline_dataset: JsonObject = field(default_factory=dict)
    has_episodes: bool = True

    @classmethod
    def of(cls, plan: LaunchPlan, gpus: tuple[str, ...] = ()) -> AttemptPlan:
        """The part of a launch plan to store."""
        shared = {one.name: getattr(plan, one.name) for one in fields(cls) if one.name != "gpus"}
        copies = {name: dict(getattr(plan, name)) for name in ("env_signature", "offline_dataset")}
        return cls(**shared | copies, gpus=gpus)

    @classmethod
    def read(cls, attempt: Attempt) -> AttemptPlan:
        """The stored plan of an attempt; an empty one if there is none."""
        data = read_versioned_json(attempt.plan) or {}
        try:
            data.pop("schema", None)
            sources = tuple(_SOURCES[source["kind"]](**upgrade_names(source)) for source in data.pop("sources"))
            for name in ("checkpoints", "videos", "gpus"):
                data[name] = tuple(data[name])
            return cls(sources=sources, **data)
        except (KeyError, TypeError):
            return cls()

    def write(self, attempt: Attempt) -> None:
        """Store the plan in the directory of an attempt."""
        write_json(attempt.plan, {"schema": 1, **asdict(self)})


@dataclass(frozen=True)
class ExitRecord:
    """exit.json, which the watchdog writes when an attempt has ended."""

    returncode: int | None = None
    """As in `os.waitstatus_to_exitcode`; None if the program could not be executed."""
    signal: int | None = None
    out_of_memory: bool = False
    launch_error: str = ""
    leftovers: int = 0
    """Number of processes that were running when the trainer had ended."""
    stop_reason: str = ""
    ended: float | None = None
    duration_s: float | None = None
    """Measured with a clock that is never set."""
    max_rss_kb: int = 0
    user_s: float = 0.0
    system_s: float = 0.0


@dataclass(frozen=True)
class StopRequest:
    """stop.json, the request to stop an attempt."""

    reason: str = "operator"
    grace_s: float | None = None
    asked: float | None = None
    """When it was requested."""


@dataclass(frozen=True)
class AttemptStatus:
    """The processes of an attempt and what is recorded about its end."""

    watchdog: ProcessIdentity | None
    trainer: ProcessIdentity | None
    watchdog_alive: bool
    trainer_alive: bool
    exit: ExitRecord | None
    stop: StopRequest | None
    started: float | None
    label: str
    """Value of `PALAESTRA_RUN` in its processes."""

    @property
    def alive(self) -> bool:
        """Whether the watchdog or the trainer is running."""
        return self.watchdog_alive or self.trainer_alive


def read_status(attempt: Attempt) -> AttemptStatus:
    """Read the files of an attempt and check whether the processes they name are running."""
    process = read_versioned_json(attempt.process) or {}
    watchdog = ProcessIdentity.from_json(process.get("watchdog"))
    trainer = ProcessIdentity.from_json(process.get("trainer"))
    # Check the processes before reading exit.json, so that a file written in between is seen.
    watchdog_alive = watchdog is not None and watchdog.is_alive()
    trainer_alive = trainer is not None and trainer.is_alive()
    exit_, stop, started = read_versioned_json(attempt.exit), read_versioned_json(attempt.stop), process.get("started")
    return AttemptStatus(
        watchdog=watchdog,
        trainer=trainer,
        watchdog_alive=watchdog_alive,
        trainer_alive=trainer_alive,
        exit=None if exit_ is None else from_damaged_json(ExitRecord, exit_),
        stop=None if stop is None else from_damaged_json(StopRequest, stop),
        started=started if isinstance(started, int | float) else None,
        label=str(process.get("label", "")),
    )


def read_exit_facts(attempt: Attempt, redact: Callable[[str], str]) -> ExitFacts:
    """Collect what is known about an attempt whose processes are all gone."""
    status = read_status(attempt)
    exit_ = status.exit or ExitRecord()
    process = status.watchdog or status.trainer
    remote = read_versioned_json(attempt.remote) or {}
    rebooted = bool(remote.get("rebooted")) or (process is not None and process.boot_id != boot_id())
    return ExitFacts(
        returncode=exit_.returncode,
        launch_error=exit_.launch_error,
        out_of_memory=exit_.out_of_memory,
        stop_reason=exit_.stop_reason or (status.stop.reason if status.stop else ""),
        reported_phase=_reported_phase(attempt.journal),
        same_boot=not rebooted,
        lost_reason=str(remote.get("lost") or ""),
        last_lines=redact(last_lines(attempt.stdout)),
        exception=redact(exception_line(attempt.stdout)),
    )


def read_versioned_json(path: Path) -> JsonObject | None:
    """Read a JSON document; None if it is missing, damaged, or of a later schema."""
    data = read_json(path)
    if data is None or not isinstance(data.get("schema", 1), int) or data.get("schema", 1) > SUPPORTED_SCHEMA:
        return None
    return upgrade_names(data)


def last_lines(path: Path, count: int = SHOWN_LINES) -> str:
    """The last lines of an output file."""
    text = read_tail(path, _TAIL_BYTES).decode("utf-8", "replace")
    # A progress bar rewrites its line; keep the final state of each line.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    return "\n".join(lines[-count:])


def exception_line(path: Path) -> str:
    """The exception of the last traceback near the end of an output file: `ValueError: bad rate`; empty without one."""
    lines = [line.rstrip("\r") for line in read_tail(path, _TAIL_BYTES).decode("utf-8", "replace").split("\n")]
    for number in range(len(lines) - 1, -1, -1):
        if _TRACEBACK not in lines[number] or lines[number - 1 if number else 0].startswith(_NOT_FATAL):
            continue
        indent = lines[number].index(_TRACEBACK)
        rest = [line[indent:] for line in lines[number + 1 :]]
        # Stack frames are indented, the exception is not.
        place = next((at for at, line in enumerate(rest) if line.strip() and not line.startswith(" ")), None)
        if place is None:
            return ""
        later = [line for line in rest[place + 1 :] if line[:1].strip() and "wandb" not in line]
        return rest[place].strip() if len(later) <= _MAX_LINES_AFTER_TRACEBACK else ""
    return ""


def read_tail(path: Path, size: int) -> bytes:
    """The last `size` bytes of a file; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read(size)
    except OSError:
        return b""


def count_lines(path: Path, max_bytes: int = 1 << 26) -> int:
    """Number of lines near the beginning of a file; 0 if it cannot be read."""
    try:
        with open(path, "rb") as file:
            blocks = iter(lambda: file.read(1 << 20), b"")
            return sum(block.count(b"\n") for block, _ in zip(blocks, range(max_bytes >> 20), strict=False))
    except OSError:
        return 0


def _reported_phase(journal: Path) -> str:
    """The phase of the last `PhaseChanged` near the end of a journal."""
    for line in reversed(read_tail(journal, _JOURNAL_TAIL_BYTES).split(b"\n")):
        if b'"PhaseChanged"' not in line:
            continue
        try:
            return str(json.loads(line)["phase"])
        except (ValueError, KeyError, TypeError):
            continue
    return ""
