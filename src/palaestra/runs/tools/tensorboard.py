"""TensorBoard for runs of any trainer: exports their metrics as event files, and starts TensorBoard on them.

An export holds every value and every episode of the journals. It is written to a temporary directory and moved into
place when complete. Steps that a resumed attempt repeated come from that attempt only.

A started instance has a free port and ends with the service or when idle. It loads everything in its directory, so each
set of runs has its own. Runs that write event files are shown live; for others, event files are exported first.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from palaestra.errors import ConfigError
from palaestra.files.atomic import atomic_directory
from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.runs.process.tool_process import ToolProcess
from palaestra.telemetry.event import EpisodeSummary, TrainingStep
from palaestra.telemetry.journal import JournalReader
from palaestra.telemetry.tensorboard import TensorBoardSink

_START_TIMEOUT_S = 60.0
_IDLE_TIMEOUT_S = 3600.0
"""An instance ends this long after it was last requested: it takes memory and keeps the service running."""
_URL = re.compile(r"at (http://\S+)")
_EVENT_FILES = "events.out.tfevents.*"
_BATCH = 10_000
_TimedEvent: TypeAlias = tuple[float, TrainingStep | EpisodeSummary]


@dataclass
class TensorBoardInstance:
    """A TensorBoard process and the runs it shows."""

    run_ids: tuple[str, ...]
    url: str
    process: ToolProcess
    timer: threading.Timer | None = None


class TensorBoards:
    """The TensorBoard instances of one service. Thread-safe."""

    def __init__(self, home: Home, idle_timeout_s: float = _IDLE_TIMEOUT_S) -> None:
        self._home, self._idle_timeout_s = home, idle_timeout_s
        self._lock = threading.Lock()
        self._instances: dict[tuple[str, ...], TensorBoardInstance] = {}

    def open(self, run_ids: Sequence[str]) -> str:
        """Return the URL of a TensorBoard for these runs, whose ids must be valid. Blocks until it has started."""
        key = tuple(sorted(set(run_ids)))
        if not key:
            raise ConfigError("runs", [], "no run to show", "Name at least one")
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError("tensorboard", "", "is not installed", "pip install 'palaestra[tensorboard]'")
        with self._lock:
            directory = self._link_runs(key)
            instance = self._instances.get(key)
            if instance is None or not instance.process.is_running:
                argv = [sys.executable, "-P", "-m", "tensorboard.main", "--logdir", str(directory)]
                argv += ["--host", "127.0.0.1", "--port", "0", "--reload_interval", "5", "--reload_multifile", "true"]
                process = ToolProcess(argv, directory.with_suffix(".log"))
                url = process.wait_for_output(_URL, _START_TIMEOUT_S)[1]
                instance = self._instances[key] = TensorBoardInstance(key, url, process)
            self._restart_timer(instance)
            return instance.url

    def running(self) -> list[TensorBoardInstance]:
        """Return the running instances."""
        return [instance for instance in list(self._instances.values()) if instance.process.is_running]

    def stop(self, run_ids: Sequence[str] = ()) -> list[TensorBoardInstance]:
        """Stop the instance for exactly these runs, or all without ids; return those that were running."""
        key = tuple(sorted(set(run_ids)))
        with self._lock:
            selected = [instance for ids, instance in self._instances.items() if not key or ids == key]
            return [instance for instance in selected if self._end(instance)]

    def close(self) -> None:
        """Stop all instances."""
        self.stop()
        with self._lock:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _restart_timer(self, instance: TensorBoardInstance) -> None:
        if instance.timer is not None:
            instance.timer.cancel()
        instance.timer = threading.Timer(self._idle_timeout_s, self._expire, (instance,))
        instance.timer.daemon = True
        instance.timer.start()

    def _expire(self, instance: TensorBoardInstance) -> None:
        with self._lock:
            # The timer may have been restarted while this waited for the lock.
            if instance.timer is threading.current_thread():
                self._end(instance)

    def _end(self, instance: TensorBoardInstance) -> bool:
        """Stop an instance; return whether it was running."""
        if instance.timer is not None:
            instance.timer.cancel()
        was_running = instance.process.is_running
        instance.process.stop()
        self._instances.pop(instance.run_ids, None)
        return was_running

    @property
    def _directory(self) -> Path:
        return self._home.service / "tensorboard"

    def _link_runs(self, run_ids: tuple[str, ...]) -> Path:
        """Create a directory with a link per run, since names with commas or colons break `--logdir_spec`."""
        name = hashlib.sha256("\n".join(run_ids).encode()).hexdigest()[:16]
        directory = self._directory / name
        for run_id in run_ids:
            run = self._home.run(run_id)
            if not run.path.is_dir():
                raise ConfigError("run", run_id, "has no directory", f"palaestra runs restore {run_id}")
            for label, events in find_event_directories(run).items():
                link = directory / label
                link.parent.mkdir(parents=True, exist_ok=True)
                if not link.is_symlink():
                    os.symlink(events, link)
        return directory


def find_event_directories(run: RunDirectory) -> dict[str, Path]:
    """Return the directories with event files of a run, by label; exports them when it has none."""
    directories: dict[str, Path] = {}
    attempts = run.attempts()
    for attempt in attempts:
        roots = (attempt.tensorboard, attempt.work)
        paths = {path.parent for root in roots if root.is_dir() for path in root.rglob(_EVENT_FILES)}
        for number, directory in enumerate(sorted(paths)):
            label = run.run_id if len(attempts) == 1 else f"{run.run_id}/attempt_{attempt.number}"
            directories[label if number == 0 else f"{label}/{directory.name}"] = directory
    return directories or {run.run_id: export_tensorboard(run).directory}


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


def _read_events(run: RunDirectory) -> Iterator[_TimedEvent]:
    attempts = run.attempts()
    first_events = [next(_read_attempt(attempt), None) for attempt in attempts]
    for number, attempt in enumerate(attempts, start=1):
        stop = min((first[1].env_step for first in first_events[number:] if first is not None), default=None)
        for time, event in _read_attempt(attempt):
            if stop is None or event.env_step < stop:
                yield time, event


def _read_attempt(attempt: Attempt) -> Iterator[_TimedEvent]:
    with JournalReader(attempt.journal) as reader:
        while records := reader.read(_BATCH):
            for _, time, event in records:
                if isinstance(event, TrainingStep | EpisodeSummary):
                    yield time, event
