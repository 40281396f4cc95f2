"""Launches and supervises runs from a Python process, without a service or HTTP.

    with TrainerOrchestrator() as orchestrator:
        run_id = orchestrator.launch("palaestra", {"env": {"id": "CartPole-v1"}})
        for record in orchestrator.stream(run_id):
            ...

Holds the lock of the state directory, so a service and an orchestrator never share one. Runs outlive it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from palaestra.config import parse_section
from palaestra.files.home import Home
from palaestra.runs.config import SupervisorConfig
from palaestra.runs.ingest.stream import StreamItem
from palaestra.runs.record import RunRecord
from palaestra.runs.runner import Runner
from palaestra.runs.runners.registry import add_installed_runners, registered_runners
from palaestra.runs.spec import RunSpec
from palaestra.runs.store.lock import ServiceLock
from palaestra.runs.store.rebuild import open_registry
from palaestra.runs.supervisor.resume import ResumeRequest
from palaestra.runs.supervisor.supervisor import Supervisor
from palaestra.runs.video.record_video import CheckpointRecorder
from palaestra.telemetry.event import Record

_T = TypeVar("_T")


class TrainerOrchestrator:
    """Launches, stops and follows runs. A context manager; its methods block and may be called from any thread."""

    def __init__(self, home: Home | Path | str | None = None, config: SupervisorConfig | None = None) -> None:
        if home is None:
            self._home = Home.default()
        else:
            self._home = home if isinstance(home, Home) else Home(Path(home).resolve() / "var" / "training")
        self._config = config
        self._runners: dict[str, Runner] = {}
        self._open = ExitStack()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._supervisor: Supervisor | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(ServiceLock(self._home))
            registry = open_registry(self._home)
            stack.callback(registry.close)
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="palaestra-orchestrator", daemon=True)
            thread.start()
            stack.callback(loop.close)
            stack.callback(thread.join)
            stack.callback(loop.call_soon_threadsafe, loop.stop)
            self._loop = loop
            catalogue = CheckpointRecorder(registry, self._home)
            stack.callback(catalogue.close)
            runners = self.registered_runners()
            supervisor = Supervisor(
                self._home, registry, runners, self._config, catalogue=catalogue, add_installed=add_installed_runners
            )
            stack.callback(lambda: self._wait(supervisor.close()))
            self._wait(supervisor.start())
            catalogue.add_missing(self._home)
            self._supervisor = supervisor
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._supervisor = None
        self._open.close()
        self._loop = None

    def register_runner(self, name: str, factory: Callable[[], Runner]) -> None:
        """Register a runner under a name; it replaces an existing one of the same name."""
        runner = factory()
        self._runners[name] = runner
        if self._supervisor is not None:
            self._supervisor.planner.runners[name] = runner

    def registered_runners(self) -> dict[str, Runner]:
        """All runners by name: built in, from installed packages, and registered here."""
        return {**registered_runners(), **self._runners}

    def launch(self, name: str, config: Mapping[str, object], /, *, consent: bool = False, **spec: object) -> str:
        """Queue a run and return its id. `consent` agrees to a command that runs third-party code."""
        parsed = parse_section(RunSpec, {"runner": name, "config": dict(config), **spec}, place="spec")
        supervisor = self._require_started()

        async def submit() -> RunRecord:
            plan = (await supervisor.preview(parsed)).plan if consent else None
            if plan is None:
                return await supervisor.submit(parsed)
            return await supervisor.submit(parsed, plan.digest(), plan.paths.run_id)

        return self._wait(submit()).run_id

    def stop(self, run_id: str, *, grace_s: float | None = None) -> RunRecord:
        """Stop a run. Returns when none of its processes is left."""
        return self._wait(self._require_started().stop(run_id, grace_s=grace_s))

    def stream(self, run_id: str) -> Iterator[Record]:
        """Iterate over the telemetry of a run from its first record on; ends with the run."""
        items = self._wait(self._subscribe(run_id))
        try:
            while (record := self._wait(_next_record(items))) is not None:
                yield record
        finally:
            self._wait(items.aclose())

    def run(self, run_id: str) -> RunRecord:
        """The current row of a run. `UnknownRun` if there is none."""
        return self._require_started().get_run(run_id)

    def resume(
        self, run_id: str, *, checkpoint: str | None = None, changes: Mapping[str, object] | None = None
    ) -> RunRecord:
        """Queue a run that has ended again, from its newest undamaged checkpoint or a given one, with changed keys."""
        return self._wait(
            self._require_started().resume(run_id, request=ResumeRequest(checkpoint, dict(changes or {})))
        )

    async def _subscribe(self, run_id: str) -> AsyncGenerator[StreamItem, None]:
        return self._require_started().subscribe(run_id)

    def _require_started(self) -> Supervisor:
        if self._supervisor is None:
            raise RuntimeError("a TrainerOrchestrator works inside its `with` block")
        return self._supervisor

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._loop is None:
            work.close()
            raise RuntimeError("a TrainerOrchestrator works inside its `with` block")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _next_record(items: AsyncIterator[StreamItem]) -> Record | None:
    async for item in items:
        if isinstance(item.item, Record):
            return item.item
    return None
