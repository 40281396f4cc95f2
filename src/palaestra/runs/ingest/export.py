"""Exports a run of any trainer as TensorBoard event files, made from its journals.

The files hold every value and every episode. They are written to a temporary directory and moved into place when
complete. Steps that a resumed attempt repeated come from that attempt only. Needs the `tensorboard` package.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

from palaestra.errors import ConfigError
from palaestra.files.atomic import atomic_directory
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.telemetry.event import EpisodeSummary, TrainingStep
from palaestra.telemetry.journal import JournalReader
from palaestra.telemetry.tensorboard import TensorBoardSink

_BATCH = 10_000

TimedEvent: TypeAlias = tuple[float, TrainingStep | EpisodeSummary]


class ExportReport(NamedTuple):
    """Result of an export."""

    points: int
    directory: Path


def export_tensorboard(run: RunDirectory, into: str | Path | None = None) -> ExportReport:
    """Write the curves of a run to a directory for `tensorboard --logdir`, replacing an earlier export.

    The default directory is the run's own `tensorboard`. Raises `ConfigError` when it cannot be written.
    """
    target = run.tensorboard if into is None else Path(into)
    if not target.is_absolute():
        raise ConfigError("into", str(target), "is not an absolute path", "Give an absolute path")
    try:
        _require_replaceable(target)
        time = 0.0
        with atomic_directory(target, durable=False) as new:
            sink = TensorBoardSink(new, clock=lambda: time, single_episodes=True)
            try:
                for record in _read_events(run):
                    time, event = record
                    sink.emit(event)
            finally:
                sink.close()
            shutil.rmtree(target, ignore_errors=True)
    except OSError as error:
        reason, remedy = f"cannot be written ({error.strerror or error})", "Choose a writable directory"
        raise ConfigError("into", str(target), reason, remedy) from None
    return ExportReport(sink.points, target)


def _require_replaceable(target: Path) -> None:
    if target.is_dir():
        others = [path.name for path in target.iterdir() if not path.name.startswith("events.out.tfevents.")]
        if not others:
            return
        reason = f"contains {others[0]}, which is not an event file and would be replaced"
    elif target.exists():
        reason = "is a file"
    else:
        return
    raise ConfigError("into", str(target), reason, "Choose a new directory")


def _read_events(run: RunDirectory) -> Iterator[TimedEvent]:
    attempts = run.attempts()
    first_events = [next(_read_attempt(attempt), None) for attempt in attempts]
    for number, attempt in enumerate(attempts, start=1):
        stop = min((first[1].env_step for first in first_events[number:] if first is not None), default=None)
        for time, event in _read_attempt(attempt):
            if stop is None or event.env_step < stop:
                yield time, event


def _read_attempt(attempt: Attempt) -> Iterator[TimedEvent]:
    with JournalReader(attempt.journal) as reader:
        while records := reader.read(_BATCH):
            for _, time, event in records:
                if isinstance(event, TrainingStep | EpisodeSummary):
                    yield time, event
