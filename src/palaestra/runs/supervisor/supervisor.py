"""The supervisor: accepts requests, launches queued runs, and stops, resumes, adopts and archives runs.

It uses one event loop and one ingestion thread, and all of its state is on disk: if it is killed at any moment, the
next one continues from the run directories. Decisions are made in `phase`, `queue`, `alarms`, `launch_planner` and
`retention`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from palaestra.errors import ConfigError, IllegalTransition, LaunchRefused, PalaestraError, UnknownRun
from palaestra.files.home import Home
from palaestra.files.run_directory import check_run_id, new_run_id
from palaestra.runs.archive.retention import RetentionAction
from palaestra.runs.archive.run_archive import RunArchive
from palaestra.runs.checkpoints.catalogue import CheckpointCatalogue
from palaestra.runs.config import SupervisorConfig
from palaestra.runs.ingest.live_metrics import LiveMetrics, MetricSubscription
from palaestra.runs.ingest.pump import Pump
from palaestra.runs.ingest.stream import Ring, StreamItem, follow
from palaestra.runs.phase import PhaseEvent
from palaestra.runs.process.attempt_process import check_no_trainer, next_attempt
from palaestra.runs.process.resource_usage import detect_gpus
from palaestra.runs.record import HERE, RunChanges, RunEdit, RunEvent, RunRecord
from palaestra.runs.remote.machines import Machines
from palaestra.runs.reproducibility.source_recorder import SourceRecorder
from palaestra.runs.runner import Runner
from palaestra.runs.spec import RunSpec
from palaestra.runs.state.event_log import RunEventLog
from palaestra.runs.state.unsupervised import find_journal_writer, may_have_changed, read_unsupervised
from palaestra.runs.store.rebuild import rebuild_if_damaged
from palaestra.runs.store.registry import Registry
from palaestra.runs.supervisor.context import BackgroundTasks, SupervisorContext
from palaestra.runs.supervisor.launch_planner import LaunchPlanner, Preview
from palaestra.runs.supervisor.queue import (
    QueuedRun,
    QueueFile,
    QueueStatus,
    Slots,
    WaitingRun,
    next_launches,
    sort_queue,
    waiting_reason,
    waiting_reasons,
)
from palaestra.runs.supervisor.resume import (
    ResumePoint,
    ResumeRequest,
    change_spec,
    check_work_left,
    read_current_spec,
    resume_columns,
)
from palaestra.runs.supervisor.run_files import (
    AdoptionReport,
    attempt_paths,
    create_run,
    find_live_runs,
    initial_record,
    plan_facts,
    remove_unfinished,
    update_unsupervised,
)
from palaestra.runs.supervisor.state_writer import EventBus, RunStateWriter
from palaestra.runs.supervisor.supervised_run import SupervisedRun
from palaestra.telemetry.event import Record

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_EDIT_TIMEOUT_S = 5.0
_RESERVED_POLL_S = 0.05
_MAX_LISTED = 200
"""Queued runs in a `QueueStatus`."""


class Supervisor:
    """Supervises all runs of one state directory. Use from one event loop, with the lock of the directory held."""

    def __init__(
        self,
        home: Home,
        registry: Registry,
        runners: Mapping[str, Runner],
        config: SupervisorConfig | None = None,
        *,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[str], str] = new_run_id,
        catalogue: CheckpointCatalogue | None = None,
        add_installed: Callable[[dict[str, Runner]], dict[str, str]] = lambda _: {},
    ) -> None:
        self._home, self._registry = home, registry
        self._config = config or SupervisorConfig()
        self._clock, self._new_id, self._catalogue = clock, new_id, catalogue
        self.planner = LaunchPlanner(
            home,
            registry,
            runners,
            Slots(self._config.max_running),
            min_free_disk_mb=self._config.min_free_disk_mb,
            add_installed=add_installed,
            machines=Machines(self._config.hosts, clock),
        )
        self._archive = RunArchive(home, registry, catalogue, self._config.retention, clock)
        self._runs: dict[str, SupervisedRun] = {}
        self._reserved: set[str] = set()
        self._editing = asyncio.Lock()
        self._generation = registry.generation
        self._draining = False
        self._queue_file = QueueFile(home)
        self._waiting_reasons: dict[str, str] = {}
        self._bus = EventBus()
        self._live_metrics = LiveMetrics()
        self._bus.subscribe(lambda run_id, event: self._live_metrics.set_ended(run_id, event.phase.has_ended))
        self._tasks = BackgroundTasks()
        self._context: SupervisorContext | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def draining(self) -> bool:
        """Whether no new runs are launched."""
        return self._draining

    @property
    def idle(self) -> bool:
        """Whether no run is running or queued."""
        return not self._runs

    async def start(self) -> AdoptionReport:
        """Adopt the runs of an earlier service, then launch queued runs."""
        self._loop = asyncio.get_running_loop()
        gpus = await asyncio.to_thread(detect_gpus)
        self.planner.slots = Slots(self._config.max_running, tuple(gpu.index for gpu in gpus))
        self._draining = self._queue_file.is_draining()
        self._context = SupervisorContext(
            home=self._home,
            registry=self._registry,
            pump=Pump(self._publish_records, self._config.poll_every_s),
            planner=self.planner,
            catalogue=self._catalogue,
            config=self._config,
            tasks=self._tasks,
            clock=self._clock,
            on_run_ended=self._remove_run,
            on_unreachable=self._wait_for_machine,
            source_recorder=SourceRecorder(self._write_versions),
        )
        self._home.runs.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(remove_unfinished, self._home)
        live, unsupervised = await asyncio.to_thread(find_live_runs, self._home, self._registry)
        report = AdoptionReport(unsupervised=unsupervised)
        for record in live:
            run = self._runs[record.run_id] = self._supervise(record)
            try:
                result = await run.adopt()
            except Exception:  # noqa: BLE001 - one run must not keep the service from starting
                _log.exception("%s: could not be adopted and is left alone", record.run_id)
                self._runs.pop(record.run_id, None)
                result = "skipped"
            getattr(report, result).append(record.run_id)
        self._tasks.spawn(self._scan_periodically())
        self._launch_queued()
        return report

    async def close(self) -> None:
        """Stop supervising. Runs continue."""
        await self._tasks.cancel()
        for run in self._runs.values():
            run.release()
        self._runs.clear()
        context, self._context = self._context, None
        if context is not None:
            await asyncio.to_thread(context.close)

    # Requests

    async def preview(self, spec: RunSpec) -> Preview:
        """What a submit of this spec would find and execute. Writes nothing."""
        return await self.planner.preview(spec, attempt_paths(self._home.run(self._generate_id(spec)), 1))

    async def submit(self, spec: RunSpec, consent: str | None = None, run_id: str | None = None) -> RunRecord:
        """Queue a run, under the id of its preview if given. A refused request writes nothing."""
        spec = await self.planner.pin_warm_start(spec)
        run_id = check_run_id(run_id or self._generate_id(spec))
        plan = (await self.planner.preview(spec, attempt_paths(self._home.run(run_id), 1))).require_plan(consent)
        paths = await asyncio.to_thread(create_run, self._home, run_id, spec, plan)
        try:
            run = self._supervise(initial_record(run_id, spec, plan, self._clock()), spec)
            facts = {"digest": plan.digest(), "consent": consent or "", **plan_facts(spec, plan)}
            await run.state.note("note", reason="submitted", facts=facts)
        except Exception:
            # A request that was answered with an error must not run later.
            await asyncio.to_thread(shutil.rmtree, paths.path, ignore_errors=True)
            await asyncio.to_thread(self._registry.delete, run_id)
            raise
        self._runs[run_id] = run
        self._launch_queued()
        return run.state.record

    async def stop(self, run_id: str, *, grace_s: float | None = None, reason: str = "operator") -> RunRecord:
        """Stop a run. Returns when none of its processes is left."""
        run = self._runs.get(check_run_id(run_id))
        if run is None:
            record = self.get_run(run_id)
            if not record.supervised and not record.phase.has_ended:
                raise self._unsupervised_error(record)
            raise IllegalTransition(f"{run_id} is {record.phase} and cannot be stopped")
        return await run.stop(reason, grace_s)

    async def resume(self, run_id: str, consent: str | None = None, request: ResumeRequest | None = None) -> RunRecord:
        """Queue a run that has ended again. A refused request, such as for a damaged checkpoint, changes nothing."""
        request = request or ResumeRequest()
        with self._reserve(check_run_id(run_id)):
            await self._wait_finished(run_id)
            record = self.get_run(run_id)
            if not record.phase.has_ended and record.supervised:
                raise IllegalTransition(f"{run_id} is {record.phase} and cannot be resumed")
            spec, point, columns = await self._plan_resume(record, consent, request)
            # Record the resume before the run is supervised: until then the run has ended for everyone.
            run = self._supervise(record, spec)
            facts = {**request.facts(), **columns}
            columns |= {"started": None, "ended": None, "alarms": ()}
            await run.state.advance(PhaseEvent.RESUMED, reason=point.description, facts=facts, **columns)
            self._runs[run_id] = run
        self._launch_queued()
        return run.state.record

    async def _plan_resume(
        self, record: RunRecord, consent: str | None, request: ResumeRequest
    ) -> tuple[RunSpec, ResumePoint, RunChanges]:
        """The spec of the new attempt, its checkpoint, and the columns of the row that change."""
        run_id = record.run_id
        if not record.supervised:
            remedy = f"palaestra train --resume {run_id}"
            raise LaunchRefused("run", run_id, "was not started by the service and cannot be resumed by it", remedy)
        if record.archived:
            raise LaunchRefused("run", run_id, "is archived", f"palaestra runs restore {run_id}")
        if self._context is not None and self._context.pump.progress(run_id) is not None:
            raise IllegalTransition(f"{run_id} has ended, and its last telemetry waits for space on the disk")
        paths = self._home.run(run_id)
        await asyncio.to_thread(check_no_trainer, paths)
        current = read_current_spec(paths, await asyncio.to_thread(RunEventLog(paths).read))
        spec = change_spec(current, request.changes, request.on)
        await self.planner.get_runner(spec.runner)
        point = await asyncio.to_thread(self.planner.find_resume_point, record, request.checkpoint)
        attempt = attempt_paths(paths, next_attempt(paths, record.attempt), point.path)
        plan = (await self.planner.preview(spec, attempt)).require_plan(consent)
        check_work_left(record, request, point, plan)
        return spec, point, resume_columns(record, request, point, plan)

    async def edit(self, run_id: str, changes: RunEdit) -> RunRecord:
        """Change what people wrote about a run, in any phase. An archived run has to be restored first."""
        try:
            # Other writes wait for space on a full disk; people do not.
            async with asyncio.timeout(_EDIT_TIMEOUT_S), self._editing:
                return await self._edit(check_run_id(run_id), changes)
        except TimeoutError:
            reason = f"could not be written within {_EDIT_TIMEOUT_S:.0f} s: the disk is full, or the registry is locked"
            raise ConfigError("run", run_id, reason, "Free space and try again") from None

    async def _edit(self, run_id: str, changes: RunEdit) -> RunRecord:
        run = self._runs.get(run_id)
        if run is not None:
            await run.state.edit(changes)
            return self.get_run(run_id)
        with self._reserve(run_id):
            record = self.get_run(run_id)
            if record.archived or not self._home.run(run_id).path.is_dir():
                reason = "is archived" if record.archived else "its directory is gone"
                raise ConfigError("run", run_id, reason, f"palaestra runs restore {run_id}")
            return await RunStateWriter(self._home, self._registry, record, self._clock, self._bus).edit(changes)

    async def _write_versions(self, run_id: str, columns: RunChanges) -> None:
        """Note what ran in the row of a run that may have ended, been edited or been resumed since it was launched."""
        while run_id in self._reserved:
            await asyncio.sleep(_RESERVED_POLL_S)
        if (run := self._runs.get(run_id)) is not None:
            await run.state.update(**columns)
        elif (record := self._registry.get(run_id)) is not None and not record.archived:
            # Read and written without a pause, so that no edit falls in between.
            self._registry.put(replace(record, **columns))

    async def drain(self, on: bool) -> None:
        """Stop or start launching new runs; the next service keeps this setting."""
        self._draining = on
        self._launch_queued()

    async def archive(self, run_id: str) -> RunRecord:
        """Pack a run that has ended."""
        return await self._change_ended(run_id, self._archive.archive)

    async def restore(self, run_id: str) -> RunRecord:
        """Unpack an archived run, or restore a deleted one; a prefix of its id is enough."""
        run_id = await asyncio.to_thread(self._archive.resolve_id, run_id)
        with self._reserve(run_id):
            return await asyncio.to_thread(self._archive.restore, run_id)

    async def delete(self, run_id: str) -> None:
        """Move a run that has ended to the trash; `restore` brings it back until it is purged."""
        await self._change_ended(run_id, self._archive.delete)

    async def gc(self, *, dry_run: bool = True) -> list[RetentionAction]:
        """Apply the retention policy, or list what it would do. A failure does not stop the others."""
        plan = await asyncio.to_thread(self._archive.plan, frozenset(self._runs))
        return plan if dry_run else [await self._apply_retention(action) for action in plan]

    async def _apply_retention(self, action: RetentionAction) -> RetentionAction:
        try:
            if action.action == "purge":  # the run has been deleted already
                with self._reserve(action.run_id):
                    await asyncio.to_thread(self._archive.purge, action)
            else:
                await self._change_ended(action.run_id, partial(self._archive.apply, action))
        except (PalaestraError, OSError) as error:
            return replace(action, failed=str(error))
        return action

    def get_run(self, run_id: str) -> RunRecord:
        """The current row of a run. `UnknownRun` if there is none."""
        run = self._runs.get(run_id)
        if run is not None:
            record = run.state.record
            if not run.is_queued:
                return record
            return replace(record, reason=waiting_reason(record, self._waiting_reasons.get(run_id, "")))
        row = self._registry.get(check_run_id(run_id))
        if row is None or may_have_changed(row, self._home.run(run_id)):
            # Not supervised: it may have started before it got a row, or ended after its row was written.
            row = read_unsupervised(self._home.run(run_id)) or row
        if row is None:
            close = self._registry.ids_with_prefix(run_id[:8])
            raise UnknownRun("run", run_id, "no such run", f"Nearest: {', '.join(close)}" if close else "")
        return row

    def queue_status(self) -> QueueStatus:
        """What runs and what waits, and why."""
        queued = sort_queue(self._list_queued())
        waiting = (WaitingRun(run.run_id, self._waiting_reasons.get(run.run_id, "")) for run in queued[:_MAX_LISTED])
        return QueueStatus(
            slots=self.planner.slots.max_running,
            running=len(self._runs) - len(queued),
            num_queued=len(queued),
            queued=tuple(waiting),
            draining=self._draining,
        )

    # Streams

    def ring(self, run_id: str) -> Ring | None:
        """The newest records of a run that has not ended."""
        run = self._runs.get(run_id)
        return None if run is None else run.ring

    def subscribe(self, run_id: str, after: str = "") -> AsyncGenerator[StreamItem, None]:
        """Everything about a run after a position, then new items as they arrive; ends with the run."""
        self.get_run(check_run_id(run_id))

        def on_event(wake: Callable[[], None]) -> Callable[[], None]:
            return self._bus.subscribe(lambda other, _: wake() if other == run_id else None)

        return follow(self._home.run(run_id), after, lambda: self.ring(run_id), on_event)

    def stream_events(self) -> AsyncIterator[tuple[str, RunEvent]]:
        """The events of all runs from now on."""
        return self._bus.stream()

    def subscribe_metrics(self, records: Sequence[RunRecord], wake: Callable[[], None]) -> MetricSubscription:
        """Collect the new points of these runs, until `unsubscribe_metrics`. `wake` is called from other threads."""
        # The records may be out of date: a run that has not ended is among those that are supervised.
        records = [self._runs[row.run_id].state.record if row.run_id in self._runs else row for row in records]
        subscription = self._live_metrics.subscribe({record.run_id: record.attempt for record in records}, wake)
        for record in records:
            if record.supervised:
                subscription.set_ended(record.run_id, record.run_id not in self._runs or record.phase.has_ended)
        return subscription

    def unsubscribe_metrics(self, subscription: MetricSubscription) -> None:
        """Stop collecting points. May be repeated."""
        self._live_metrics.unsubscribe(subscription)

    def flush_series(self, run_id: str) -> None:
        """Write everything that is known of a run's metrics to its stored series. Blocks; may be called in a thread."""
        if self._context is not None:
            self._context.pump.flush(run_id)

    def _publish_records(self, run_id: str, attempt: int, records: list[Record]) -> None:
        """Called in the thread of the pump."""
        self._live_metrics.publish(run_id, attempt, records)
        run, loop = self._runs.get(run_id), self._loop
        if run is None or loop is None:
            return
        run.ring.publish(attempt, records)
        with contextlib.suppress(RuntimeError):  # the loop is closed; the next service reads the records from disk
            loop.call_soon_threadsafe(run.on_telemetry, attempt, records)

    # Scheduling

    def _supervise(self, record: RunRecord, spec: RunSpec | None = None) -> SupervisedRun:
        if self._context is None:
            raise RuntimeError("the supervisor is not started")
        state = RunStateWriter(self._home, self._registry, record, self._clock, self._bus)
        return SupervisedRun(state, self._context, spec)

    def _remove_run(self, run_id: str) -> None:
        self._runs.pop(run_id, None)
        self._launch_queued()

    def _launch_queued(self) -> None:
        """Launch the queued runs that fit. Idempotent."""
        if self._context is None:
            return
        queued = self._list_queued()
        running = {run_id: run.lease for run_id, run in self._runs.items() if not run.is_queued}
        machines = {name: self.planner.slots_of(name) for name in {HERE, *(n for run in queued for n in run.machines)}}
        self._waiting_reasons = waiting_reasons(queued, running, machines, self._draining)
        self._queue_file.write(self._draining, self._waiting_reasons)
        for run_id, lease in next_launches(queued, running, machines, self._draining).items():
            self._runs[run_id].lease, self._runs[run_id].has_slot = lease, True
            self._tasks.spawn(self._runs[run_id].launch())

    def _list_queued(self) -> list[QueuedRun]:
        runs = ((run.state.record, run.spec) for run in self._runs.values() if run.is_queued)
        machines = self.planner.list_machines
        return [QueuedRun(row.run_id, row.priority, row.created, spec.gpus, machines(spec)) for row, spec in runs]

    def _wait_for_machine(self, machine: str, reason: str) -> None:
        self.planner.mark_unreachable(machine, reason)
        self._launch_queued()

    async def _scan_periodically(self) -> None:
        """Keep the registry complete and the rows of unsupervised runs up to date."""
        while True:
            await asyncio.sleep(self._config.scan_every_s)
            try:
                if self.planner.waits_for_machines:
                    self._launch_queued()
                await asyncio.to_thread(self._check_registry)
                await asyncio.to_thread(update_unsupervised, self._home, self._registry, self._runs.keys())
            except Exception:  # noqa: BLE001 - the next scan tries again
                _log.exception("the run directories could not be scanned")

    def _check_registry(self) -> None:
        """In a thread: fill a registry that was removed or recreated."""
        if self._registry.was_replaced:
            rebuild_if_damaged(self._home, self._registry)
        if self._registry.generation == self._generation:
            return
        self._generation = self._registry.generation
        self._registry.put_many([run.state.record for run in list(self._runs.values())])
        if self._catalogue is not None:
            self._catalogue.add_missing(self._home)

    # Changes of runs that have ended

    async def _change_ended(self, run_id: str, change: Callable[[RunRecord], _T]) -> _T:
        with self._reserve(run_id):
            await self._wait_finished(run_id)
            record = self.get_run(run_id)
            if not record.phase.has_ended:
                if not record.supervised:
                    raise self._unsupervised_error(record)
                text = f"{run_id} is {record.phase}: only a run that has ended can be archived or deleted"
                raise IllegalTransition(f"{text}. Stop it with: palaestra runs stop {run_id}")
            await asyncio.to_thread(check_no_trainer, self._home.run(run_id))
            if self._context is not None:
                await self._context.source_recorder.wait(run_id)
            return await asyncio.to_thread(change, record)

    async def _wait_finished(self, run_id: str) -> None:
        """Wait until the end of a run that has ended is completely recorded."""
        if (run := self._runs.get(run_id)) is not None and run.state.phase.has_ended:
            await run.wait_finished()

    @contextlib.contextmanager
    def _reserve(self, run_id: str) -> Iterator[None]:
        """Exclude concurrent requests that archive, delete, restore, resume or edit the run."""
        if run_id in self._reserved:
            busy = "being archived, deleted, restored, resumed or edited by another request"
            raise IllegalTransition(f"{run_id} is {busy}")
        self._reserved.add(run_id)
        try:
            yield
        finally:
            self._reserved.discard(run_id)

    def _unsupervised_error(self, record: RunRecord) -> IllegalTransition:
        writer = find_journal_writer(self._home.run(record.run_id).attempt(record.attempt))
        remedy = f"end it with kill {writer.pid}" if writer else "its process is gone by now"
        return IllegalTransition(f"{record.run_id} was started without the service and is not stopped by it; {remedy}")

    def _generate_id(self, spec: RunSpec) -> str:
        return self._new_id(spec.name or spec.env_id or spec.script or spec.runner)
