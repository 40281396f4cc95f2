"""What all supervised runs share, and the background tasks of the supervisor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from palaestra.files.home import Home
from palaestra.runs.checkpoints.catalogue import CheckpointCatalogue
from palaestra.runs.config import SupervisorConfig
from palaestra.runs.ingest.pump import Pump
from palaestra.runs.reproducibility.source_recorder import SourceRecorder
from palaestra.runs.store.registry import Registry
from palaestra.runs.supervisor.launch_planner import LaunchPlanner

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class BackgroundTasks:
    """Tasks of the event loop that log their exceptions: the failure of one run must not affect the others."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def spawn(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Run a coroutine in the background."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    async def cancel(self) -> None:
        """Cancel all tasks and wait for them."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _log.error("a background task of the supervisor failed", exc_info=error)


@dataclass(frozen=True)
class SupervisorContext:
    """What all supervised runs share."""

    home: Home
    registry: Registry
    pump: Pump
    planner: LaunchPlanner
    catalogue: CheckpointCatalogue | None
    config: SupervisorConfig
    tasks: BackgroundTasks
    clock: Callable[[], float]
    on_run_ended: Callable[[str], None]
    """Called with the run id when the slot of a run is free."""
    source_recorder: SourceRecorder
    on_unreachable: Callable[[str, str], None] = lambda _machine, _reason: None
    """Called with a machine that does not answer, and why: runs for it wait."""

    def close(self) -> None:
        """Stop ingestion and recording. Blocks."""
        self.source_recorder.close()
        self.pump.close()
