"""Films new checkpoints of the runs that asked for it, beside their training and never in its way.

One clip at a time, in a process that steps back for everybody else. Of checkpoints that come while one is being filmed
only the newest of each run is filmed next. What cannot be filmed is a warning in the log.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from palaestra.errors import PalaestraError
from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt
from palaestra.runs.checkpoints.catalogue import CheckpointIndex
from palaestra.runs.record import CheckpointRecord, RunRecord
from palaestra.runs.state.attempt_plan import AttemptPlan
from palaestra.runs.store.registry import Registry
from palaestra.runs.video.recording import record_clip
from palaestra.telemetry.event import Record

__all__ = ["CheckpointRecorder"]

_NICE = 19
_log = logging.getLogger(__name__)


class CheckpointRecorder:
    """A catalogue of checkpoints that has the new ones filmed. `close` gives up what is being filmed."""

    def __init__(
        self, catalogue: CheckpointIndex, home: Home, registry: Registry, film: Callable[..., Any] = record_clip
    ) -> None:
        self._catalogue, self._home, self._registry, self._film = catalogue, home, registry, film
        self._lock = threading.Lock()
        self._wanted: dict[str, CheckpointRecord] = {}
        self._worker: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def busy(self) -> bool:
        """Whether a clip is in the making."""
        return self._worker is not None

    def seen(self, run: RunRecord, attempt: Attempt, records: Sequence[Record]) -> None:
        """Checkpoints that a trainer announced; the newest is filmed when its run asked for it."""
        self._catalogue.seen(run, attempt, records)
        plan = AttemptPlan.read(attempt)
        if plan is None or not plan.film:
            return
        known = self._registry.checkpoints(run_id=run.run_id)
        if not known:
            return
        with self._lock:
            self._wanted[run.run_id] = known[0]
            if self._worker is None and not self._closed.is_set():
                self._worker = threading.Thread(target=self._work, name="camera-crew", daemon=True)
                self._worker.start()

    def scan(self, run: RunRecord, attempt: Attempt, patterns: Sequence[str]) -> None:
        """An attempt has ended."""
        self._catalogue.scan(run, attempt, patterns)

    def catch_up(self, home: Home, enough: Callable[[], bool] = lambda: False) -> int:
        """The registry was made anew."""
        return self._catalogue.catch_up(home, enough)

    def recall(self, home: Home, run: RunRecord) -> None:
        """A run was put away or brought back."""
        self._catalogue.recall(home, run)

    def close(self) -> None:
        """Film nothing more; returns when nobody films."""
        self._closed.set()
        worker = self._worker
        if worker is not None:
            worker.join()

    def _work(self) -> None:
        while (checkpoint := self._next()) is not None:
            run = self._home.run(checkpoint.run_id)
            try:
                self._film(run, checkpoint, nice=_NICE, cancelled=self._closed.is_set)
            except (PalaestraError, OSError) as error:
                if not self._closed.is_set():
                    _log.warning("%s: no clip of %s: %s", run.run_id, checkpoint.checkpoint_id, error)

    def _next(self) -> CheckpointRecord | None:
        with self._lock:
            if self._wanted and not self._closed.is_set():
                return self._wanted.pop(next(iter(self._wanted)))
            self._worker = None
            return None
