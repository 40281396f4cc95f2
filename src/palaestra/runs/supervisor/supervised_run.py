"""One run under supervision: launches or adopts its attempt, monitors it, stops it, and records how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace

from palaestra.errors import ConfigError, HostUnreachable, IllegalTransition, LaunchRefused, PalaestraError
from palaestra.files.atomic import read_json
from palaestra.files.run_directory import Attempt
from palaestra.redaction import Redactor
from palaestra.runs.archive.package import directory_size
from palaestra.runs.ingest.stream import Ring
from palaestra.runs.phase import AttemptOutcome, Phase, PhaseEvent, determine_outcome
from palaestra.runs.process.attempt_process import (
    AttemptProcess,
    check_no_trainer,
    find_survivors,
    find_unrecorded_attempt,
    has_run,
    kill_all,
    next_attempt,
    write_process_record,
)
from palaestra.runs.process.resource_usage import ResourceSampler
from palaestra.runs.record import HERE, Alarm, RunRecord
from palaestra.runs.remote.remote_process import RemotePlace, RemoteProcess
from palaestra.runs.runner import LaunchPlan
from palaestra.runs.spec import RunSpec
from palaestra.runs.state.alarms import AlarmLimits, describe_missing_episodes, lasting_alarms, merge_alarms
from palaestra.runs.state.attempt_files import AttemptPlan, AttemptStatus, StopRequest, read_exit_facts, read_status
from palaestra.runs.state.progress import AttemptProgress, RunTotals
from palaestra.runs.supervisor.attempt_monitor import AttemptMonitor
from palaestra.runs.supervisor.context import SupervisorContext
from palaestra.runs.supervisor.launch_planner import find_script_change
from palaestra.runs.supervisor.queue import Lease
from palaestra.runs.supervisor.resume import read_current_spec
from palaestra.runs.supervisor.run_files import digest_plan, prepare_attempt
from palaestra.runs.supervisor.state_writer import RunStateWriter
from palaestra.telemetry.event import CheckpointSaved, Record

_DRAIN_S = 5.0
"""How long the end of a run waits for the last telemetry; what a full disk delays longer is read later."""

_DRAIN_LATER_S = 24 * 3600.0
_FULL_DISK_WAIT_S = 2.0
"""How long a stop waits until its event can be written to a full disk."""

_RETRY_S = 1.0
_EXIT_FACTS = ("returncode", "signal", "leftovers", "duration_s", "max_rss_kb", "user_s", "system_s")
_log = logging.getLogger(__name__)


class SupervisedRun:
    """A run that has not ended."""

    def __init__(self, state: RunStateWriter, context: SupervisorContext, spec: RunSpec | None = None) -> None:
        self.state = state
        self.ring = Ring()
        # The defaults hold until the spec is read. Not validated: an odd row must not keep a service from starting.
        self.spec = spec or RunSpec.model_construct(runner=state.record.runner)
        self.lease = Lease()
        self.has_slot = False
        self._context = context
        self._spawn = context.tasks.spawn
        self._lock = asyncio.Lock()
        self._process: AttemptProcess | RemoteProcess | None = None
        self._monitor: AttemptMonitor | None = None
        self._totals_before = RunTotals()
        self._new_checkpoints: list[Record] = []
        self._cataloguing: asyncio.Task[None] | None = None
        self._finished = asyncio.Event()

    @property
    def is_queued(self) -> bool:
        """Whether the run waits for a slot."""
        return self.state.phase is Phase.QUEUED and not self.has_slot

    async def launch(self) -> None:
        """Start the next attempt, unless the run was stopped while it was queued."""
        async with self._lock:
            if self.state.phase is Phase.QUEUED:
                await self._start(await asyncio.to_thread(next_attempt, self.state.paths, self.state.record.attempt))

    async def adopt(self) -> str:
        """Continue where an earlier service was killed: `queued`, `adopted`, `relaunched` or `ended`."""
        async with self._lock:
            await self._record_unknown_attempt()
            try:
                events = await self.state.read_events()
                self.spec = await asyncio.to_thread(read_current_spec, self.state.paths, events)
            except ConfigError as error:
                if self.state.phase is Phase.QUEUED:
                    await self._refuse(str(error), "spec")
                    return "ended"
            if self.state.phase is Phase.QUEUED:
                return "queued"
            attempt = self.state.paths.attempt(self.state.record.attempt)
            plan, place = AttemptPlan.read(attempt), RemotePlace.read(attempt)
            # The row has the machine from the moment of the launch; remote.json is written after the code is sent.
            self.lease = Lease(plan.gpus, self.state.record.host if place is None else place.host)
            if place is not None and not attempt.exit.exists():
                return await self._adopt_elsewhere(attempt, plan, place)
            status = await asyncio.to_thread(_find_status, attempt)
            # A watchdog that has recorded the exit may not have exited yet itself.
            process = AttemptProcess.adopt(attempt) if status.exit is None else None
            if process is not None:
                await self._adopt_process(process, plan)
                return "adopted"
            if status.exit is None and status.watchdog is None and status.trainer is None and not has_run(attempt):
                # The service was killed before the launch: nothing has run, so the attempt is launched now.
                await kill_all(str((read_json(attempt.launch) or {}).get("label", "")), None)
                self._spawn(self._relaunch(attempt.number))
                return "relaunched"
            await kill_all(status.label, None)
            self._spawn(self._conclude(attempt, plan))
            return "ended"

    async def stop(self, reason: str, grace_s: float | None) -> RunRecord:
        """Stop the run. Returns when none of its processes is left and its end is recorded."""
        async with self._lock:
            phase = self.state.phase
            if phase.has_ended:
                raise IllegalTransition(f"{self.state.run_id} is {phase} and cannot be stopped")
            if phase is Phase.QUEUED:
                await self._end_without_process(
                    PhaseEvent.STOP_ASKED, "stopped by the operator before it began", reason
                )
                return self.state.record
            words = "asked to stop" if reason == "operator" else f"asked to stop ({reason})"
            recording = self._spawn(self.state.advance(PhaseEvent.STOP_ASKED, reason=words, code=reason))
            # A run that fills the disk must be stopped although the event cannot be written yet.
            await asyncio.wait({recording}, timeout=_FULL_DISK_WAIT_S)
            if recording.done() and (error := recording.exception()) is not None:
                if isinstance(error, PalaestraError):
                    raise error
                _log.error("%s: its stop could not be recorded", self.state.run_id, exc_info=error)
            process = self._process
        if process is not None:
            if grace_s is None:
                grace_s = self.spec.stop_grace_s
            if grace_s is None:
                grace_s = AttemptPlan.read(process.attempt).stop_grace_s
            await process.stop(reason, grace_s)
            if process.unreachable:
                # The request is stored, and delivered when the machine answers.
                words = f"{words}; {process.unreachable}. The stop is delivered when it answers"
                return await self.state.advance(PhaseEvent.STOP_ASKED, reason=words, code=reason)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if recording.done() else _FULL_DISK_WAIT_S):
                await self._finished.wait()
        return self.state.record

    async def wait_finished(self) -> None:
        """Wait until everything about the end of the run is recorded."""
        await self._finished.wait()

    def on_telemetry(self, attempt: int, records: list[Record]) -> None:
        """Process new telemetry: wake the monitor and catalogue announced checkpoints."""
        if self._monitor is not None:
            self._monitor.wake()
        self._new_checkpoints += [record for record in records if isinstance(record.event, CheckpointSaved)]
        if self._new_checkpoints and (self._cataloguing is None or self._cataloguing.done()):
            self._cataloguing = self._spawn(self._catalogue_new(self.state.paths.attempt(attempt)))

    def release(self) -> None:
        """Release the descriptors of the process because the service ends; the run continues."""
        if self._process is not None:
            self._process.close()

    # Launching and adopting

    async def _record_unknown_attempt(self) -> None:
        """Record an attempt that ran or runs but is missing in a damaged event log."""
        events = await self.state.read_events()
        attempt = await asyncio.to_thread(find_unrecorded_attempt, self.state.paths, events)
        if attempt is None:
            return
        number = attempt.number
        _log.warning("%s: attempt %d is missing in its event log, which is damaged", self.state.run_id, number)
        reason = "found on the disk; the event log of the run is damaged"
        if self.state.phase.has_process:
            await self.state.update(attempt=number)
            await self.state.note("note", reason=reason)
            return
        if self.state.phase.has_ended:
            await self.state.advance(PhaseEvent.RESUMED, reason=reason, ended=None)
        started = (await asyncio.to_thread(read_status, attempt)).started
        at = self._context.clock() if started is None else started
        await self.state.advance(PhaseEvent.LAUNCHED, reason=reason, at=at, attempt=number, started=at, ended=None)

    async def _start(self, number: int, *, is_recorded: bool = False) -> None:
        """Launch an attempt. On any failure the run is refused, so that it never stays between two phases."""
        attempt = self.state.paths.attempt(number)
        try:
            plan = await self._plan(number)
            await asyncio.to_thread(prepare_attempt, attempt, plan, self.lease.gpus)
        except Exception as error:  # noqa: BLE001 - a runner is third-party code
            if is_recorded and (place := RemotePlace.read(attempt)) is not None:
                await self._link(attempt, AttemptPlan.read(attempt), place)
            elif is_recorded or not self._postpone(error):
                is_away = isinstance(error, HostUnreachable)
                await self._refuse(self._describe(error), "unreachable" if is_away else "preflight")
            return
        spec = self.spec
        try:
            if not is_recorded:
                config_digest, now = digest_plan(spec, plan), self._context.clock()
                host = self.lease.machine
                facts = {"digest": plan.digest(), "gpus": list(self.lease.gpus), "config_digest": config_digest}
                facts |= {"host": host} if host or self.state.record.host else {}
                await self.state.advance(
                    PhaseEvent.LAUNCHED,
                    facts=facts,
                    at=now,
                    attempt=number,
                    started=now,
                    ended=None,
                    config_digest=config_digest,
                    host=host,
                )
            process = await self._launch_process(plan, attempt)
        except Exception as error:  # noqa: BLE001 - a failed launch must release its slot
            survivors = await asyncio.to_thread(find_survivors, attempt)
            await kill_all(survivors.label, survivors.trainer)
            await self._refuse(self._describe(error), "exec_failed")
            return
        await self._supervise(process, AttemptPlan.of(plan, self.lease.gpus))

    async def _launch_process(self, plan: LaunchPlan, attempt: Attempt) -> AttemptProcess | RemoteProcess:
        machines, lease, spec = self._context.planner.machines, self.lease, self.spec
        if lease.machine != HERE:
            return await machines.launch(lease.machine, plan, attempt, spec, lease.gpus, self._spawn)
        return await AttemptProcess.launch(plan, attempt, memory_mb=spec.memory_mb, nice=spec.nice)

    def _postpone(self, error: Exception) -> bool:
        """Return to the queue if the machine does not answer; False if that would not help."""
        if not isinstance(error, HostUnreachable) or error.permanent:
            return False
        machine, self.lease, self.has_slot = self.lease.machine, Lease(), False
        self._context.on_unreachable(machine, error.reason)
        return True

    async def _adopt_elsewhere(self, attempt: Attempt, plan: AttemptPlan, place: RemotePlace) -> str:
        if not place.started and self.state.phase is not Phase.STOPPING:
            # The other machine may have started it: it is asked to, and starts an attempt once.
            self._spawn(self._relaunch(attempt.number))
            return "relaunched"
        await self._link(attempt, plan, place)
        return "adopted"

    async def _link(self, attempt: Attempt, plan: AttemptPlan, place: RemotePlace) -> None:
        # Also without a confirmation: the request of an earlier service may have reached the machine.
        await self._adopt_process(self._context.planner.machines.adopt(attempt, place, self._spawn), plan)

    async def _relaunch(self, number: int) -> None:
        async with self._lock:
            if self.state.phase is Phase.STOPPING:
                reason = "stopped by the operator before it began"
                await self._end_without_process(PhaseEvent.STOPPED, reason, "operator")
            else:
                await self._start(number, is_recorded=True)

    async def _plan(self, number: int) -> LaunchPlan:
        await asyncio.to_thread(check_no_trainer, self.state.paths)
        paths = await asyncio.to_thread(self._context.planner.plan_attempt_paths, self.state.record, number)
        preview = await self._context.planner.preview(self.spec, paths, self.lease.gpus, self.lease.machine)
        if preview.plan is not None and number > 1:
            # The request to resume is the consent.
            return preview.require_plan(preview.plan.digest())
        events = await self.state.read_events()
        consent = next((str(event.facts["consent"]) for event in events if event.facts.get("consent")), None)
        return preview.require_plan(consent)

    def _describe(self, error: Exception) -> str:
        if isinstance(error, LaunchRefused) and error.place == "command":
            return error.reason
        if isinstance(error, PalaestraError | OSError):
            return str(error)
        _log.error("%s: could not be started", self.state.run_id, exc_info=error)
        return f"could not be started ({type(error).__name__}: {error})"

    async def _adopt_process(self, process: AttemptProcess | RemoteProcess, plan: AttemptPlan) -> None:
        await self.state.note("adopted", facts={"watchdog_alive": process.watchdog_alive})
        await self._supervise(process, plan)
        if self.state.phase is Phase.STOPPING:
            # The request may not have reached the watchdog; repeating it can only shorten the grace period.
            request = read_status(process.attempt).stop or StopRequest()
            waited = 0.0 if request.asked is None else max(0.0, time.time() - request.asked)
            grace_s = plan.stop_grace_s if request.grace_s is None else request.grace_s
            self._spawn(process.stop(request.reason, max(0.0, grace_s - waited)))

    # Monitoring

    async def _supervise(self, process: AttemptProcess | RemoteProcess, plan: AttemptPlan) -> None:
        self._process = process
        context, spec, record = self._context, self.spec, self.state.record
        await self.state.update(watchdog=process.watchdog, trainer=process.trainer)
        await self._start_ingestion(process.attempt, plan)
        context.source_recorder.add(self.state.run_id, process.attempt, spec)
        drift = await asyncio.to_thread(
            find_script_change, context.home, context.registry, record.agent_id, record.run_id, plan.script_sha256
        )
        self._monitor = AttemptMonitor(
            self.state,
            process,
            lambda: context.pump.progress(self.state.run_id),
            self._limits(plan),
            poll_s=context.config.alarm_every_s,
            clock=context.clock,
            totals_before=self._totals_before,
            drift=drift,
            on_stall=lambda: None if spec.stall_action == "alarm" else self._spawn(self.stop("stalled", None)),
        )
        self._spawn(self._watch_until_end(self._monitor, process, plan))

    async def _start_ingestion(self, attempt: Attempt, plan: AttemptPlan) -> None:
        events = await self.state.read_events()
        self._totals_before = RunTotals.before_attempt(events, attempt.number)
        self._context.pump.watch(self.state.run_id, attempt, plan.sources, self.spec.thin_every)

    async def _watch_until_end(
        self, monitor: AttemptMonitor, process: AttemptProcess | RemoteProcess, plan: AttemptPlan
    ) -> None:
        sampling = self._spawn(self._sample_resources(process))
        try:
            await self._retry(monitor.run)
        finally:
            sampling.cancel()
        process.close()
        await self._conclude(process.attempt, plan)

    async def _sample_resources(self, process: AttemptProcess | RemoteProcess) -> None:
        root = process.watchdog if process.watchdog_alive else process.trainer
        if root is None:
            return
        sampler = ResourceSampler(process.attempt, root, self.lease.gpus, clock=self._context.clock)
        while True:
            await asyncio.to_thread(sampler.sample)
            await asyncio.sleep(self._context.config.sample_every_s)

    async def _retry(self, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat `work` until it succeeds: an error of ours must not lose a run."""
        while True:
            try:
                return await work()
            except Exception:  # noqa: BLE001
                _log.exception("%s: supervision failed and is retried", self.state.run_id)
                await asyncio.sleep(_RETRY_S)

    def _limits(self, plan: AttemptPlan) -> AlarmLimits:
        default = self._context.config.no_episode_steps if plan.has_episodes else 0
        steps = self.spec.no_episode_steps
        return AlarmLimits(self.spec.stall_after_s, default if steps is None else steps)

    # Checkpoints

    async def _catalogue_new(self, attempt: Attempt) -> None:
        while self._new_checkpoints:
            records, self._new_checkpoints = self._new_checkpoints, []
            await asyncio.to_thread(self._catalogue, attempt, records)

    def _catalogue(self, attempt: Attempt, announced: list[Record] | None = None) -> None:
        """Catalogue announced checkpoints or, without any, search the attempt for files. In a thread: it may hash."""
        catalogue = self._context.catalogue
        if catalogue is None:
            return
        try:
            if announced:
                catalogue.add_announced(self.state.record, attempt, announced)
            else:
                catalogue.scan_attempt(self.state.record, attempt, AttemptPlan.read(attempt).checkpoints)
        except (PalaestraError, OSError) as error:
            _log.warning("%s: its checkpoints could not be catalogued: %s", self.state.run_id, error)

    # The end

    async def _conclude(self, attempt: Attempt, plan: AttemptPlan) -> None:
        await self._retry(lambda: self._record_end(attempt, plan))

    async def _record_end(self, attempt: Attempt, plan: AttemptPlan) -> None:
        if self.state.phase.has_ended:
            self._finish()
            return
        context, run_id = self._context, self.state.run_id
        if context.pump.progress(run_id) is None:
            await self._start_ingestion(attempt, plan)
        progress = await asyncio.to_thread(context.pump.finish, run_id, _DRAIN_S)
        while self._cataloguing is not None and not self._cataloguing.done():
            await asyncio.wait({self._cataloguing})
        await self._catalogue_new(attempt)
        await asyncio.to_thread(self._catalogue, attempt)
        facts = await asyncio.to_thread(read_exit_facts, attempt, Redactor.from_environment(os.environ))
        size = await asyncio.to_thread(directory_size, self.state.paths.path)
        exit_ = read_status(attempt).exit
        alarms = merge_alarms(self.state.record.alarms, lasting_alarms(progress, context.clock()))
        outcome = self._explain(determine_outcome(facts), progress, alarms, self._limits(plan))
        if self.state.phase is Phase.STARTING and (progress.seq or progress.output_bytes):
            # The attempt ended before the monitor saw its output.
            await self.state.advance(PhaseEvent.FIRST_SIGN)
        noted = {alarm.code for alarm in self.state.record.alarms}
        for alarm in alarms:
            if alarm.code not in noted:
                await self.state.note("alarm", reason=alarm.text, code=alarm.code)
        if outcome.event is not PhaseEvent.SUCCEEDED:
            succeeded = [e.attempt for e in await self.state.read_events() if e.kind == PhaseEvent.SUCCEEDED]
            if succeeded:
                outcome = replace(outcome, reason=f"{outcome.reason}; attempt {succeeded[-1]} succeeded")
        url = progress.tracking_url or self.state.record.tracking_url
        columns = self._totals_before.columns_with(progress)
        ended = self._end_time(None if exit_ is None else exit_.duration_s)
        columns |= {"tracking_url": url, "bytes_on_disk": size, "ended": ended, "alarms": alarms}
        failed_output = outcome.event is not PhaseEvent.SUCCEEDED and facts.last_lines
        await self.state.advance(
            outcome.event,
            reason=outcome.reason,
            code=outcome.code,
            facts={
                **({name: getattr(exit_, name) for name in _EXIT_FACTS} if exit_ is not None else {}),
                **({"last_lines": facts.last_lines} if failed_output else {}),
                **columns,
                "alarms": [asdict(alarm) for alarm in alarms],
            },
            **columns,
        )
        self._finish()
        if progress.problem:
            self._spawn(self._drain_later(attempt, plan))

    def _explain(
        self, outcome: AttemptOutcome, progress: AttemptProgress, alarms: tuple[Alarm, ...], limits: AlarmLimits
    ) -> AttemptOutcome:
        """Explain a success that deserves a look: no finished episode, or alarms about the metrics."""
        if outcome.event is not PhaseEvent.SUCCEEDED:
            return outcome
        missing = describe_missing_episodes(self._totals_before.new_steps(progress), progress.episodes, limits)
        if missing:
            return replace(outcome, reason=missing, code="no_episodes")
        if alarms and outcome.code == "exit":
            return replace(outcome, reason=alarms[0].text, code=alarms[0].code)
        return outcome

    def _end_time(self, duration: float | None) -> float:
        """When the attempt ended: by the watchdog's clock, else now, else at the last output before our time."""
        started, now = self.state.record.started, self._context.clock()
        if duration is not None and started is not None:
            # Measured with a clock that is never set, so the duration does not depend on the wall clock.
            return started + duration
        if self._process is not None:
            return now
        attempt, times = self.state.paths.attempt(self.state.record.attempt), [started or now]
        for path in (attempt.stdout, attempt.journal):
            with contextlib.suppress(OSError):
                times.append(path.stat().st_mtime)
        return min(now, max(times))

    async def _drain_later(self, attempt: Attempt, plan: AttemptPlan) -> None:
        """Read telemetry that did not fit on the disk at the end of the run once there is space."""
        pump, run_id = self._context.pump, self.state.run_id
        pump.watch(run_id, attempt, plan.sources, self.spec.thin_every)
        progress = await asyncio.to_thread(pump.finish, run_id, _DRAIN_LATER_S)
        await self.state.update(**self._totals_before.columns_with(progress))
        await asyncio.to_thread(self._catalogue, attempt)

    async def _refuse(self, reason: str, code: str) -> None:
        await self._end_without_process(PhaseEvent.LAUNCH_REFUSED, reason, code)

    async def _end_without_process(self, event: PhaseEvent, reason: str, code: str) -> None:
        """Record the end of a run whose attempt was not started."""
        now = self._context.clock()
        try:
            if not await self.state.cancel_resume(reason):
                await self.state.advance(event, reason=reason, code=code, ended=now)
        except OSError:
            # The directory cannot be written; the slot is released all the same.
            _log.exception("%s: its end could not be recorded", self.state.run_id)
            await self.state.advance_row(event, reason, code, ended=now)
        finally:
            self._finish()

    def _finish(self) -> None:
        self._finished.set()
        self._context.on_run_ended(self.state.run_id)


def _find_status(attempt: Attempt) -> AttemptStatus:
    """The status of an attempt; if process.json is lost, live processes are found and recorded again."""
    status = read_status(attempt)
    if status.exit is None and status.watchdog is None and not attempt.launch.exists():
        survivors = find_survivors(attempt)
        if survivors.alive:
            write_process_record(attempt, survivors)
            return read_status(attempt)
    return status
