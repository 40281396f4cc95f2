"""TensorBoard on some runs: started on a free port, used again for the same runs, and gone when we are, or before.

One instance shows one set of runs: it loads everything it is pointed at. Runs that write event files are shown live;
of others the curves are written first, as they are at that moment.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from palaestra.errors import ConfigError
from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.runs.process.tool_process import ToolProcess

__all__ = ["Shown", "TensorBoards", "event_directories"]

START_S = 60.0
IDLE_S = 3600.0
"""After so long without anybody who asks for it one ends: each holds memory, and keeps the service there."""
_URL = re.compile(r"at (http://\S+)")
_EVENTS = "events.out.tfevents.*"


@dataclass
class Shown:
    """One instance and what it shows."""

    run_ids: tuple[str, ...]
    url: str
    tool: ToolProcess
    timer: threading.Timer | None = None


class TensorBoards:
    """The instances of one service. Threads may share it."""

    def __init__(self, home: Home, idle_s: float = IDLE_S) -> None:
        self._home, self._idle_s = home, idle_s
        self._lock = threading.Lock()
        self._open: dict[tuple[str, ...], Shown] = {}

    def open(self, run_ids: Sequence[str]) -> str:
        """The URL of a TensorBoard that shows these runs. Ids must have been validated; blocks until it answers."""
        wanted = tuple(sorted(set(run_ids)))
        if not wanted:
            raise ConfigError("runs", [], "no run to show", "Name at least one")
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError("tensorboard", "", "is not installed", "pip install 'palaestra[tensorboard]'")
        with self._lock:
            links = self._linked(wanted)
            known = self._open.get(wanted)
            if known is not None and known.tool.is_running:
                self._keep(known)
                return known.url
            argv = [sys.executable, "-P", "-m", "tensorboard.main", "--logdir", str(links), "--host", "127.0.0.1"]
            argv += ["--port", "0", "--reload_interval", "5", "--reload_multifile", "true"]
            tool = ToolProcess(argv, links.with_suffix(".log"))
            shown = self._open[wanted] = Shown(wanted, tool.wait_for_output(_URL, START_S)[1], tool)
            self._keep(shown)
            return shown.url

    @property
    def in_use(self) -> bool:
        """Whether one is running that somebody may be looking at."""
        return any(shown.tool.is_running for shown in list(self._open.values()))

    def shown(self) -> list[Shown]:
        """Those that are running."""
        return [shown for shown in list(self._open.values()) if shown.tool.is_running]

    def stop(self, run_ids: Sequence[str] = ()) -> list[Shown]:
        """End the one that shows exactly these runs, or all of them when none is named; those that ended."""
        wanted = tuple(sorted(set(run_ids)))
        with self._lock:
            found = [shown for key, shown in self._open.items() if not wanted or key == wanted]
            return [shown for shown in found if self._end(shown)]

    def close(self) -> None:
        """End all of them."""
        self.stop()
        with self._lock:
            shutil.rmtree(self._place, ignore_errors=True)

    def _keep(self, shown: Shown) -> None:
        """For a while from now on."""
        if shown.timer is not None:
            shown.timer.cancel()
        shown.timer = threading.Timer(self._idle_s, self._expire, (shown,))
        shown.timer.daemon = True
        shown.timer.start()

    def _expire(self, shown: Shown) -> None:
        with self._lock:
            # Somebody may have asked for it while this waited.
            if shown.timer is threading.current_thread():
                self._end(shown)

    def _end(self, shown: Shown) -> bool:
        """Whether it lived until now."""
        if shown.timer is not None:
            shown.timer.cancel()
        lived = shown.tool.is_running
        shown.tool.stop()
        self._open.pop(shown.run_ids, None)
        return lived

    @property
    def _place(self) -> Path:
        return self._home.service / "tensorboard"

    def _linked(self, run_ids: tuple[str, ...]) -> Path:
        """A directory with a link per run: names with commas and colons would not survive on a command line."""
        name = hashlib.sha256("\n".join(run_ids).encode()).hexdigest()[:16]
        directory = self._place / name
        for run_id in run_ids:
            run = self._home.run(run_id)
            if not run.path.is_dir():
                raise ConfigError("run", run_id, "has no directory", f"palaestra runs restore {run_id}")
            for label, events in event_directories(run).items():
                link = directory / label
                link.parent.mkdir(parents=True, exist_ok=True)
                if not link.is_symlink():
                    os.symlink(events, link)
        return directory


def event_directories(run: RunDirectory) -> dict[str, Path]:
    """Where a run's event files are, by the name to show; written from its journal when it has none of its own."""
    found: dict[str, Path] = {}
    attempts = run.attempts()
    for attempt in attempts:
        for number, directory in enumerate(_own(attempt)):
            label = run.run_id if len(attempts) == 1 else f"{run.run_id}/attempt_{attempt.number}"
            found[label if number == 0 else f"{label}/{directory.name}"] = directory
    if found:
        return found
    from palaestra.runs.ingest.export import export_tensorboard

    return {run.run_id: export_tensorboard(run, run.tensorboard).directory}


def _own(attempt: Attempt) -> list[Path]:
    roots = (attempt.tensorboard, attempt.work)
    return sorted({path.parent for root in roots if root.is_dir() for path in root.rglob(_EVENTS)})
