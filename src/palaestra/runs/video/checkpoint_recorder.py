"""Records clips of new checkpoints of the runs that asked for it, without slowing down their training.

One clip is recorded at a time, in a low-priority process. If several checkpoints of a run arrive meanwhile, only the
newest is recorded next. A failed recording is logged as a warning.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from palaestra.errors import PalaestraError
from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt
from palaestra.runs.checkpoints.catalogue import CheckpointCatalogue
from palaestra.runs.record import CheckpointRecord, RunRecord
from palaestra.runs.state.attempt_plan import AttemptPlan
from palaestra.runs.store.registry import Registry
from palaestra.runs.video.record_video import record_clip
from palaestra.telemetry.event import Record

_NICENESS = 19
_log = logging.getLogger(__name__)


class CheckpointRecorder(CheckpointCatalogue):
    """A catalogue that also records clips of announced checkpoints. `close` cancels the current recording."""

    def __init__(self, registry: Registry, home: Home, record: Callable[..., object] = record_clip) -> None:
        super().__init__(registry)
        self._home, self._record = home, record
        self._lock = threading.Lock()
        self._pending: dict[str, CheckpointRecord] = {}
        self._worker: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def busy(self) -> bool:
        """Whether a clip is being recorded."""
        return self._worker is not None

    def add_announced(self, run: RunRecord, attempt: Attempt, records: Sequence[Record]) -> None:
        """Add announced checkpoints, and record the newest if its run asked for it."""
        super().add_announced(run, attempt, records)
        plan = AttemptPlan.read(attempt)
        if plan is None or not plan.record_video:
            return
        checkpoints = self._registry.checkpoints(run_id=run.run_id)
        if not checkpoints:
            return
        with self._lock:
            self._pending[run.run_id] = checkpoints[0]
            if self._worker is None and not self._closed.is_set():
                self._worker = threading.Thread(target=self._work, name="checkpoint-recorder", daemon=True)
                self._worker.start()

    def close(self) -> None:
        """Stop recording and wait for the worker thread."""
        self._closed.set()
        worker = self._worker
        if worker is not None:
            worker.join()

    def _work(self) -> None:
        while (checkpoint := self._next()) is not None:
            run = self._home.run(checkpoint.run_id)
            try:
                self._record(run, checkpoint, niceness=_NICENESS, is_cancelled=self._closed.is_set)
            except (PalaestraError, OSError) as error:
                if not self._closed.is_set():
                    _log.warning("%s: no clip of %s: %s", run.run_id, checkpoint.checkpoint_id, error)

    def _next(self) -> CheckpointRecord | None:
        with self._lock:
            if self._pending and not self._closed.is_set():
                return self._pending.pop(next(iter(self._pending)))
            self._worker = None
            return None
