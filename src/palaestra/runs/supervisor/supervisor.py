"""The acting part of the run service: takes requests, starts what is due, watches, stops, adopts and records.

One event loop, one pump thread, no state that is not also on disk: killed at any moment, the next one goes on from the
run directories. What is decided is decided elsewhere (`phase`, `queue`, `alarms`, `preflight`, `retention`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from palaestra.errors import IllegalTransition, LaunchRefused, PalaestraError, UnknownRun
from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt, check_run_id, new_run_id
from palaestra.runs.archive.retention import RetentionAction
from palaestra.runs.archive.run_archive import RunArchive
from palaestra.runs.checkpoints.catalogue import CheckpointIndex
from palaestra.runs.ingest.pump import Pump
from palaestra.runs.ingest.ring import Ring
from palaestra.runs.ingest.stream import StreamItem, follow
from palaestra.runs.phase import PhaseEvent
from palaestra.runs.process.attempt_process import check_no_trainer, next_attempt
from palaestra.runs.process.resource_usage import detect_gpus
from palaestra.runs.record import RunEvent, RunRecord
from palaestra.runs.runner import AttemptPaths, Machine, Runner
from palaestra.runs.runners.registry import runner_not_found
from palaestra.runs.spec import RunSpec
from palaestra.runs.state.attempt_plan import AttemptPlan
from palaestra.runs.state.event_log import RunEventLog
from palaestra.runs.state.queue_file import QueueFile, waiting_reason
from palaestra.runs.state.unsupervised import find_journal_writer, read_unsupervised
from palaestra.runs.store.rebuild import rebuild_if_damaged
from palaestra.runs.store.registry import Registry
from palaestra.runs.supervisor.admission import admit, first_row, free_disk, named, place_of
from palaestra.runs.supervisor.adoption import AdoptionReport, found_on_disk, remove_unfinished
from palaestra.runs.supervisor.config import SupervisorConfig
from palaestra.runs.supervisor.event_bus import EventBus
from palaestra.runs.supervisor.preflight import Preview, preflight
from palaestra.runs.supervisor.queue import Running as Slot
from palaestra.runs.supervisor.queue import Slots, Waiting, next_launches, why_waiting
from palaestra.runs.supervisor.resume import (
    ResumePoint,
    ResumeRequest,
    changed_columns,
    changed_spec,
    check_work_left,
    find_resume_point,
    resumed_spec,
)
from palaestra.runs.supervisor.script_drift import plan_drift
from palaestra.runs.supervisor.state_writer import RunStateWriter
from palaestra.runs.supervisor.supervised_run import SupervisedRun, SupervisorContext
from palaestra.runs.supervisor.warm_start import looked_with_weights, named_in_full
from palaestra.telemetry.event import Record

__all__ = ["Supervisor", "SupervisorConfig"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Supervisor:
    """Looks after all runs of one state directory. Use from one event loop, with the directory's lock held."""

    def __init__(
        self,
        home: Home,
        registry: Registry,
        runners: Mapping[str, Runner],
        config: SupervisorConfig | None = None,
        *,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[str], str] = new_run_id,
        catalogue: CheckpointIndex | None = None,
        installed: Callable[[dict[str, Runner]], dict[str, str]] = lambda _: {},
    ) -> None:
        self.runners, self._add_installed = dict(runners), installed
        self._home, self._registry = home, registry
        self._config = config or SupervisorConfig()
        self._clock, self._new_id, self._catalogue = clock, new_id, catalogue
        self._attic = RunArchive(home, registry, catalogue, self._config.retention, clock)
        self._runs: dict[str, SupervisedRun] = {}
        self._changing: set[str] = set()
        self._generation = registry.generation
        self._slots = Slots(self._config.max_running)
        self._draining = False
        self._queue = QueueFile(home)
        self._why: dict[str, str] = {}
        self._news = EventBus()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pump: Pump | None = None
        self._around: SupervisorContext | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def draining(self) -> bool:
        """Whether nothing new is started."""
        return self._draining

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._runs

    @property
    def slots(self) -> Slots:
        """What there is to share out."""
        return self._slots

    async def start(self) -> AdoptionReport:
        """Adopt what an earlier service left, then launch what waits."""
        self._loop = asyncio.get_running_loop()
        gpus = await asyncio.to_thread(detect_gpus)
        self._slots = Slots(self._config.max_running, tuple(gpu.index for gpu in gpus))
        self._draining = self._queue.draining()
        self._pump = Pump(self._publish, self._config.poll_every_s)
        self._home.runs.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(remove_unfinished, self._home)
        found = await asyncio.to_thread(found_on_disk, self._home, self._registry)
        report = AdoptionReport(unsupervised=found.unsupervised)
        self._around = self._surroundings(self._pump)
        for record in found.live:
            report = report.adding(record.run_id, await self._adopted(self._take_in(record)))
        self._spawn(self._scan())
        self._kick()
        return report

    async def close(self) -> None:
        """Let go of everything. Runs go on."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for run in self._runs.values():
            run.let_go()
        self._runs.clear()
        if self._pump is not None:
            await asyncio.to_thread(self._pump.close)
            self._pump = None

    async def preview(self, spec: RunSpec) -> Preview:
        """What a start of this would find and execute. Writes nothing."""
        runner = await self.runner_named(spec.runner)
        place = place_of(self._home.run(self._stem_id(spec)), 1)
        return await self._look_ahead(spec, runner, place, self._slots.gpus)

    async def submit(self, spec: RunSpec, consent: str | None = None, run_id: str | None = None) -> RunRecord:
        """Queue a run, under the id of its preview if given. Refusals come before anything is written."""
        runner = await self.runner_named(spec.runner)
        run_id = check_run_id(run_id or self._stem_id(spec))
        place = place_of(self._home.run(run_id), 1)
        spec = await asyncio.to_thread(named_in_full, self._home, spec, runner)
        plan = (await self._look_ahead(spec, runner, place, self._slots.gpus)).agreed(consent)
        paths = await asyncio.to_thread(admit, self._home, run_id, spec, plan)
        try:
            run = self._made(first_row(run_id, spec, plan, self._clock()), spec)
            facts = {"digest": plan.digest(), "consent": consent or "", **named(plan)}
            await run.book.noted("note", reason="submitted", facts=facts)
        except Exception:
            # Who is told that it failed must not find it running later.
            await asyncio.to_thread(shutil.rmtree, paths.path, ignore_errors=True)
            await asyncio.to_thread(self._registry.delete, run_id)
            raise
        self._runs[run_id] = run
        self._kick()
        return run.book.record

    async def stop(self, run_id: str, *, grace_s: float | None = None, reason: str = "operator") -> RunRecord:
        """End a run. Returns when nothing of it lives."""
        run = self._runs.get(check_run_id(run_id))
        if run is None:
            record = self.known(run_id)
            if not record.supervised and not record.phase.has_ended:
                raise self._not_ours(record)
            raise IllegalTransition(f"{run_id} is {record.phase} and cannot be stopped")
        return await run.stop(reason, grace_s)

    async def resume(self, run_id: str, consent: str | None = None, request: ResumeRequest | None = None) -> RunRecord:
        """Queue a run that has ended once more. What is refused, for a damaged checkpoint too, changes nothing."""
        request = request or ResumeRequest()
        with self._alone(check_run_id(run_id)):
            await self._left(run_id)
            record = self.known(run_id)
            if not record.phase.has_ended and record.supervised:
                raise IllegalTransition(f"{run_id} is {record.phase} and cannot be resumed")
            spec, point, columns = await self._resumable(record, consent, request)
            # Written down before it is taken in: until then it has ended for everybody.
            run = self._made(record, spec)
            facts = {**request.facts(), **columns}
            await run.book.happened(
                PhaseEvent.RESUMED,
                reason=point.description,
                facts=facts,
                started=None,
                ended=None,
                alarms=(),
                **columns,
            )
            self._runs[run_id] = run
        self._kick()
        return run.book.record

    async def _resumable(
        self, record: RunRecord, consent: str | None, request: ResumeRequest
    ) -> tuple[RunSpec, ResumePoint, dict[str, Any]]:
        """What would be executed, from which checkpoint, and the columns of the row that change."""
        run_id = record.run_id
        if not record.supervised:
            remedy = f"palaestra train --resume {run_id}"
            raise LaunchRefused("run", run_id, "was not started by the service and cannot be resumed by it", remedy)
        if record.archived:
            raise LaunchRefused("run", run_id, "is archived", f"palaestra runs restore {run_id}")
        if self._pump is not None and self._pump.progress(run_id) is not None:
            raise IllegalTransition(f"{run_id} has ended, and its last telemetry waits for space on the disk")
        paths = self._home.run(run_id)
        await asyncio.to_thread(check_no_trainer, paths)
        spec = changed_spec(resumed_spec(paths, await asyncio.to_thread(RunEventLog(paths).read)), request.changes)
        runner = await self.runner_named(spec.runner)
        point = await asyncio.to_thread(self._resume_point, record, request.checkpoint)
        place = place_of(paths, next_attempt(paths, record.attempt), point.checkpoint.path)
        plan = (await self._look_ahead(spec, runner, place, self._slots.gpus)).agreed(consent)
        check_work_left(record, request, point, plan)
        return spec, point, changed_columns(record, request, point, plan)

    def _resume_point(self, record: RunRecord, wanted: str | None) -> ResumePoint:
        rows = self._registry.checkpoints(run_id=record.run_id)
        return find_resume_point(self._home.run(record.run_id), record, rows, wanted)

    async def drain(self, on: bool) -> None:
        """Start nothing new, or start again; the next service keeps to it."""
        self._draining = on
        self._kick()

    async def archive(self, run_id: str) -> RunRecord:
        """Pack a run that has ended."""
        return await self._put_away(run_id, self._attic.archive)

    async def restore(self, run_id: str) -> RunRecord:
        """Unpack an archived run, or bring back a deleted one; the beginning of its id is enough."""
        run_id = await asyncio.to_thread(self._attic.meant, run_id)
        with self._alone(run_id):
            return await asyncio.to_thread(self._attic.restore, run_id)

    async def delete(self, run_id: str) -> None:
        """Throw a run that has ended away; `restore` brings it back until it is purged."""
        await self._put_away(run_id, self._attic.delete)

    async def gc(self, *, dry_run: bool = True) -> list[RetentionAction]:
        """What the retention policy does; done only when it is not a dry run, and one failure stops no other."""
        plan = await asyncio.to_thread(self._attic.plan, frozenset(self._runs))
        return plan if dry_run else [await self._carried_out(doom) for doom in plan]

    async def _carried_out(self, doom: RetentionAction) -> RetentionAction:
        try:
            if doom.action == "purge":  # there is no run any more
                with self._alone(doom.run_id):
                    await asyncio.to_thread(self._attic.purge, doom)
            else:
                await self._put_away(doom.run_id, partial(self._attic.carry_out, doom))
        except (PalaestraError, OSError) as error:
            return replace(doom, failed=str(error))
        return doom

    def ring(self, run_id: str) -> Ring | None:
        """The newest records of a run that is not over."""
        run = self._runs.get(run_id)
        return None if run is None else run.ring

    def subscribe(self, run_id: str, after: str = "") -> AsyncIterator[StreamItem]:
        """Everything of a run behind a position, then what comes; ends with the run."""
        self.known(check_run_id(run_id))

        def listen(wake: Callable[[], None]) -> Callable[[], None]:
            return self._news.listen(lambda other, _: wake() if other == run_id else None)

        return follow(self._home.run(run_id), after, lambda: self.ring(run_id), listen)

    def lives(self) -> AsyncIterator[tuple[str, RunEvent]]:
        """What happens to all runs, from now on."""
        return self._news.all()

    def _publish(self, run_id: str, attempt: int, records: list[Record]) -> None:
        """In the pump's thread."""
        run, loop = self._runs.get(run_id), self._loop
        if run is None or loop is None:
            return
        run.ring.publish(attempt, records)
        with contextlib.suppress(RuntimeError):  # the loop is gone; the next service reads it all from disk
            loop.call_soon_threadsafe(run.heard, attempt, records)

    def _take_in(self, record: RunRecord, spec: RunSpec | None = None) -> SupervisedRun:
        run = self._made(record, spec)
        self._runs[record.run_id] = run
        return run

    def _made(self, record: RunRecord, spec: RunSpec | None) -> SupervisedRun:
        if self._around is None:
            raise RuntimeError("start() comes first")
        book = RunStateWriter(self._home, self._registry, record, self._clock, self._news.tell)
        return SupervisedRun(book, self._around, spec)

    def _surroundings(self, pump: Pump) -> SupervisorContext:
        def over(run_id: str) -> None:
            self._runs.pop(run_id, None)
            self._kick()

        async def look(spec: RunSpec, place: AttemptPaths, gpus: tuple[str, ...]) -> Preview:
            return await self._look_ahead(spec, await self.runner_named(spec.runner), place, gpus)

        return SupervisorContext(
            home=self._home,
            registry=self._registry,
            pump=pump,
            clock=self._clock,
            alarm_every_s=self._config.alarm_every_s,
            sample_every_s=self._config.sample_every_s,
            no_episode_steps=self._config.no_episode_steps,
            look_ahead=look,
            place=self._place,
            spawn=self._spawn,
            over=over,
            saved=self._saved,
        )

    def _saved(self, record: RunRecord, attempt: Attempt, records: list[Record]) -> None:
        """In a thread: checkpoints that a trainer announced, and at its end those that merely lie there."""
        if self._catalogue is None:
            return
        try:
            if records:
                self._catalogue.seen(record, attempt, records)
            else:
                plan = AttemptPlan.read(attempt) or AttemptPlan()
                self._catalogue.scan(record, attempt, plan.checkpoints)
        except (PalaestraError, OSError) as error:
            _log.warning("%s: its checkpoints could not be catalogued: %s", record.run_id, error)

    def _kick(self) -> None:
        """Start whatever is due. Harmless when repeated."""
        waiting, running = [], []
        for run in self._runs.values():
            if run.waits:
                record = run.book.record
                gpus = run.spec.gpus if run.spec is not None else 0
                waiting.append(Waiting(record.run_id, record.priority, record.created, gpus))
            else:
                running.append(Slot(run.book.run_id, run.gpus))
        if self._pump is None:
            return
        self._why = why_waiting(waiting, running, self._slots, self._draining)
        self._queue.write(self._draining, self._why)
        for launch in next_launches(waiting, running, self._slots, self._draining):
            run = self._runs[launch.run_id]
            run.gpus, run.due = launch.gpus, True
            self._spawn(run.launch())

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._came_back)
        return task

    def _came_back(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # One run's trouble must not end the watch over the others.
            _log.error("something went wrong while looking after a run", exc_info=error)

    async def _adopted(self, run: SupervisedRun) -> str:
        try:
            return await run.adopt()
        except Exception:  # noqa: BLE001 - one run's trouble must not keep the service from starting
            _log.exception("%s: could not be taken over and is left alone", run.book.run_id)
            self._runs.pop(run.book.run_id, None)
            return "left_alone"

    async def _scan(self) -> None:
        """Keep the rows of runs that were started without us true."""
        while True:
            await asyncio.sleep(self._config.scan_every_s)
            try:
                await asyncio.to_thread(self._keep_registry)
                await asyncio.to_thread(self._scan_once)
            except Exception:  # noqa: BLE001 - looked at again in a moment
                _log.exception("the runs on the disk could not be looked at")

    def _keep_registry(self) -> None:
        """In a thread: a registry that somebody removed, or that was made anew, knows everything again."""
        if self._registry.was_replaced:
            rebuild_if_damaged(self._home, self._registry)
        if self._registry.generation == self._generation:
            return
        self._generation = self._registry.generation
        self._registry.put_many([run.book.record for run in list(self._runs.values())])
        if self._catalogue is not None:
            self._catalogue.catch_up(self._home)

    def _scan_once(self) -> None:
        for path in self._home.runs.iterdir():
            if path.name.startswith(".") or path.name in self._runs:
                continue
            known = self._registry.get(path.name)
            if known is not None and (known.supervised or known.phase.has_ended):
                continue
            try:
                found = read_unsupervised(self._home.run(path.name))
            except OSError:
                continue  # no directory, or not ours to read
            if found is not None and found != known:
                self._registry.put(found)

    async def _look_ahead(self, spec: RunSpec, runner: Runner, place: AttemptPaths, gpus: tuple[str, ...]) -> Preview:
        machine = Machine(environment=dict(os.environ), free_disk_bytes=free_disk(self._home), gpus=gpus)

        def look(spec: RunSpec) -> Preview:
            least, drift = self._config.min_free_disk_mb, partial(plan_drift, self._home, self._registry, runner.name)
            return preflight(spec, runner, machine, place, slots=self._slots, min_free_disk_mb=least, drift=drift)

        try:
            return await asyncio.to_thread(looked_with_weights, self._home, spec, runner, place, look)
        except PalaestraError:
            raise
        except Exception as error:
            _log.exception("runner %s failed while looking ahead", runner.name)
            reason = f"failed while looking ahead ({type(error).__name__}: {error})"
            raise LaunchRefused("runner", runner.name, reason, "This is a fault of the runner; see the log") from error

    def _place(self, run_id: str, number: int) -> AttemptPaths:
        run = self._home.run(run_id)
        if number == 1:
            return place_of(run, number)
        wanted = ResumeRequest.pending(RunEventLog(run).read()).checkpoint
        return place_of(run, number, self._resume_point(self.known(run_id), wanted).checkpoint.path)

    async def runner_named(self, name: str) -> Runner:
        """One runner; one of a package that was installed meanwhile is loaded. `LaunchRefused` without it."""
        broken = await self.refresh_runners() if name not in self.runners else {}
        if name not in self.runners:
            raise runner_not_found(name, self.runners, broken)
        return self.runners[name]

    async def refresh_runners(self) -> dict[str, str]:
        """Look for runners that were installed meanwhile; why some cannot be loaded, by name."""
        found = dict(self.runners)
        broken = await asyncio.to_thread(self._add_installed, found)
        self.runners |= found
        return broken

    def _stem_id(self, spec: RunSpec) -> str:
        return self._new_id(spec.name or spec.env_id or spec.script or spec.runner)

    def known(self, run_id: str) -> RunRecord:
        """What a run is at the moment. `UnknownRun` when there is none."""
        run = self._runs.get(run_id)
        if run is not None:
            told = run.book.record
            return replace(told, reason=waiting_reason(told, self._why.get(run_id, ""))) if run.waits else told
        record = self._registry.get(check_run_id(run_id))
        if record is None or not (record.supervised or record.phase.has_ended):
            # Started without us: a moment ago, so that it has no row, or ended a moment ago, so that the row is old.
            record = read_unsupervised(self._home.run(run_id)) or record
        if record is None:
            close = self._registry.ids_with_prefix(run_id[:8])
            raise UnknownRun("run", run_id, "no such run", f"Nearest: {', '.join(close)}" if close else "")
        return record

    async def _put_away(self, run_id: str, work: Callable[[RunRecord], _T]) -> _T:
        with self._alone(run_id):
            await self._left(run_id)
            record = self.known(run_id)
            if not record.phase.has_ended:
                if not record.supervised:
                    raise self._not_ours(record)
                text = f"{run_id} is {record.phase}: only a run that has ended can be put away"
                raise IllegalTransition(f"{text}. Stop it with: palaestra runs stop {run_id}")
            await asyncio.to_thread(check_no_trainer, self._home.run(run_id))
            return await asyncio.to_thread(work, record)

    async def _left(self, run_id: str) -> None:
        """Returns when the last things about a run whose end is known are written."""
        if (run := self._runs.get(run_id)) is not None and run.book.phase.has_ended:
            await run.left()

    @contextlib.contextmanager
    def _alone(self, run_id: str) -> Iterator[None]:
        """While this lasts nobody else puts the run away, brings it back or resumes it."""
        if run_id in self._changing:
            raise IllegalTransition(f"{run_id} is being put away, brought back or resumed by somebody else")
        self._changing.add(run_id)
        try:
            yield
        finally:
            self._changing.discard(run_id)

    def _not_ours(self, record: RunRecord) -> IllegalTransition:
        holder = find_journal_writer(self._home.run(record.run_id).attempt(record.attempt))
        how = f"end it with kill {holder.pid}" if holder else "it is gone by now"
        return IllegalTransition(f"{record.run_id} was started without the service and is not stopped by it; {how}")
