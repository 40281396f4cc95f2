"""What files and the kernel say about one attempt: who lives, how it ended, what it said last.

Reads and never writes, and imports nothing heavy: `palaestra runs list` asks it about every run that is not over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palaestra.files.atomic import read_json
from palaestra.files.run_directory import Attempt
from palaestra.processes.procfs import ProcessIdentity, boot_id
from palaestra.runs.phase import EndFacts

__all__ = ["LABEL", "Observation", "end_facts", "exception_line", "last_lines", "last_said", "observe", "read_known"]

LABEL = "PALAESTRA_RUN"
"""The environment variable that says which attempt a process belongs to."""

KNOWN_SCHEMA = 1
SHOWN_LINES = 20
_TAIL_BYTES = 1 << 16
_JOURNAL_TAIL_BYTES = 1 << 18
_TRACEBACK = "Traceback (most recent call last):"
_NOT_THE_END = ("Exception ignored in", "Exception in thread", "Error in atexit")
"""What stands in front of a traceback that ended something else than the program."""
_LINES_AFTER_TRACEBACK = 20
"""Of a program that goes on after a traceback: it has another reason to end. W&B's summary is not counted."""


@dataclass(frozen=True)
class Observation:
    """One attempt, looked at."""

    warden: ProcessIdentity | None
    trainer: ProcessIdentity | None
    warden_lives: bool
    trainer_lives: bool
    exit: dict[str, Any] | None
    """How it ended, when its warden saw it."""
    stop: dict[str, Any] | None
    """The request to end it, when there was one."""
    label: str = ""
    """What its processes carry as `PALAESTRA_RUN`."""

    @property
    def alive(self) -> bool:
        """Whether anybody of it is still there to wait for."""
        return self.warden_lives or self.trainer_lives


def observe(attempt: Attempt) -> Observation:
    """Look at an attempt: its files, and whether the very processes they name are running."""
    process = read_known(attempt.process) or {}
    warden, trainer = (
        ProcessIdentity.from_json(process.get("warden")),
        ProcessIdentity.from_json(process.get("trainer")),
    )
    # Who lives is looked up before the exit is read: an exit that is written in between is then seen.
    warden_lives = warden is not None and warden.is_alive()
    trainer_lives = trainer is not None and trainer.is_alive()
    return Observation(
        warden=warden,
        trainer=trainer,
        warden_lives=warden_lives,
        trainer_lives=trainer_lives,
        exit=read_known(attempt.exit),
        stop=read_known(attempt.stop),
        label=str(process.get("label", "")),
    )


def end_facts(attempt: Attempt, redact: Callable[[str], str]) -> EndFacts:
    """What is known about an attempt of which nothing lives any more."""
    seen = observe(attempt)
    exit_ = seen.exit or {}
    code = exit_.get("returncode")
    request = seen.stop or {}
    known = seen.warden or seen.trainer
    return EndFacts(
        returncode=code if isinstance(code, int) else None,
        launch_error=str(exit_.get("launch_error") or ""),
        out_of_memory=bool(exit_.get("out_of_memory")),
        stop_reason=str(exit_.get("stop_reason") or request.get("reason") or ""),
        last_said=last_said(attempt.journal),
        same_boot=known is None or known.boot_id == boot_id(),
        last_lines=redact(last_lines(attempt.stdout)),
        exception=redact(exception_line(attempt.stdout)),
    )


def read_known(path: Path) -> dict[str, Any] | None:
    """A JSON document of a schema we know; a later one is treated as if it were not there."""
    data = read_json(path)
    if data is None or not isinstance(data.get("schema", 1), int) or data.get("schema", 1) > KNOWN_SCHEMA:
        return None
    return data


def last_lines(path: Path, count: int = SHOWN_LINES) -> str:
    """The end of an output."""
    text = _tail(path, _TAIL_BYTES).decode("utf-8", "replace")
    # A progress bar rewrites its line; what stood there last is what a person saw.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    return "\n".join(lines[-count:])


def exception_line(path: Path) -> str:
    """`ValueError: bad learning rate`: the exception of the last traceback near the end of an output; else empty."""
    lines = [line.rstrip("\r") for line in _tail(path, _TAIL_BYTES).decode("utf-8", "replace").split("\n")]
    for number in range(len(lines) - 1, -1, -1):
        if _TRACEBACK not in lines[number] or lines[number - 1 if number else 0].startswith(_NOT_THE_END):
            continue
        indent = lines[number].index(_TRACEBACK)
        rest = [line[indent:] for line in lines[number + 1 :]]
        # Frames are indented, what was raised is not.
        place = next((at for at, line in enumerate(rest) if line.strip() and not line.startswith(" ")), None)
        if place is None:
            return ""
        went_on = [line for line in rest[place + 1 :] if line[:1].strip() and "wandb" not in line]
        return rest[place].strip() if len(went_on) <= _LINES_AFTER_TRACEBACK else ""
    return ""


def last_said(journal: Path) -> str:
    """The phase of the last `PhaseChanged` near the end of a journal."""
    for line in reversed(_tail(journal, _JOURNAL_TAIL_BYTES).split(b"\n")):
        if b'"PhaseChanged"' not in line:
            continue
        try:
            return str(json.loads(line)["phase"])
        except (ValueError, KeyError, TypeError):
            continue
    return ""


def _tail(path: Path, size: int) -> bytes:
    try:
        with open(path, "rb") as file:
            end = os.fstat(file.fileno()).st_size
            file.seek(max(0, end - size))
            return file.read(size)
    except OSError:
        return b""
