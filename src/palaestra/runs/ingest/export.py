"""A run as TensorBoard shows it, whoever trained it: event files made from its journals.

Every value and every single episode is in them. Written beside their place and moved there when complete. Steps that a
resumed attempt took again come from that attempt alone. Needs the `tensorboard` package.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from palaestra.errors import ConfigError
from palaestra.files.atomic import atomic_directory
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.telemetry.event import EpisodeSummary, TrainingStep
from palaestra.telemetry.journal import JournalReader
from palaestra.telemetry.tensorboard import TensorBoardSink

__all__ = ["ExportReport", "export_tensorboard"]

_BATCH = 10_000


class ExportReport(NamedTuple):
    """What was written where."""

    points: int
    directory: Path


def export_tensorboard(run: RunDirectory, into: Path) -> ExportReport:
    """Write the curves of a run into a directory that `tensorboard --logdir` shows, replacing an earlier export."""
    _require_replaceable(into)
    time = 0.0
    with atomic_directory(into, durable=False) as new:
        sink = TensorBoardSink(new, clock=lambda: time, single_episodes=True)
        try:
            for record in _records(run):
                time = record.time
                sink.emit(record.event)
        finally:
            sink.close()
        shutil.rmtree(into, ignore_errors=True)
    return ExportReport(sink.points, into)


def _require_replaceable(into: Path) -> None:
    if into.is_dir():
        strangers = [path.name for path in into.iterdir() if not path.name.startswith("events.out.tfevents.")]
        if not strangers:
            return
        reason = f"holds {strangers[0]}, which is no event file, and would be replaced"
    elif into.exists():
        reason = "is a file"
    else:
        return
    raise ConfigError("into", str(into), reason, "Name a new directory")


class _Told(NamedTuple):
    time: float
    event: TrainingStep | EpisodeSummary


def _records(run: RunDirectory) -> Iterator[_Told]:
    attempts = run.attempts()
    begins = [_first_step(attempt) for attempt in attempts]
    for number, attempt in enumerate(attempts):
        stop = min((step for step in begins[number + 1 :] if step is not None), default=None)
        for told in _journal(attempt):
            if stop is None or told.event.env_step < stop:
                yield told


def _first_step(attempt: Attempt) -> int | None:
    first = next(_journal(attempt), None)
    return None if first is None else first.event.env_step


def _journal(attempt: Attempt) -> Iterator[_Told]:
    with JournalReader(attempt.journal) as reader:
        while records := reader.read(_BATCH):
            for _, time, event in records:
                if isinstance(event, TrainingStep | EpisodeSummary):
                    yield _Told(time, event)
