"""One run in the hands of the supervisor: launched or adopted, watched, stopped, and its end written down."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass, replace
from typing import Any

from palaestra.errors import ConfigError, IllegalTransition, LaunchRefused, PalaestraError
from palaestra.files.atomic import read_json
from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt
from palaestra.redaction import Redactor
from palaestra.runs.archive.packing import size_of
from palaestra.runs.ingest.pump import Pump
from palaestra.runs.ingest.ring import Ring
from palaestra.runs.phase import AttemptOutcome, Phase, PhaseEvent, advance, determine_outcome
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
from palaestra.runs.record import RunRecord
from palaestra.runs.runner import AttemptPaths, LaunchPlan
from palaestra.runs.spec import RunSpec
from palaestra.runs.state.alarms import AlarmLimits, describe_missing_episodes, lasting_alarms, merge_alarms
from palaestra.runs.state.attempt_plan import AttemptPlan
from palaestra.runs.state.attempt_status import AttemptStatus, read_exit_facts, read_status
from palaestra.runs.state.event_log import RunEventLog
from palaestra.runs.state.progress import RunTotals
from palaestra.runs.store.registry import Registry
from palaestra.runs.supervisor.admission import prepare_attempt
from palaestra.runs.supervisor.attempt_monitor import AttemptMonitor
from palaestra.runs.supervisor.preflight import Preview
from palaestra.runs.supervisor.resume import resumed_spec
from palaestra.runs.supervisor.script_drift import script_drift
from palaestra.runs.supervisor.state_writer import RunStateWriter
from palaestra.telemetry.event import CheckpointSaved, Record

__all__ = ["SupervisedRun", "SupervisorContext"]

_DRAIN_S = 5.0
"""How long an end waits for the last telemetry; what a full disk holds back longer comes later."""

_DRAIN_LATER_S = 24 * 3600.0
_DISK_S = 2.0
"""How long a stop waits for a disk that is full."""

_TRY_AGAIN_S = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SupervisorContext:
    """What a run needs of its supervisor."""

    home: Home
    registry: Registry
    pump: Pump
    clock: Callable[[], float]
    alarm_every_s: float
    sample_every_s: float
    no_episode_steps: int
    look_ahead: Callable[[RunSpec, AttemptPaths, tuple[str, ...]], Awaitable[Preview]]
    place: Callable[[str, int], AttemptPaths]
    spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
    over: Callable[[str], None]
    """Told that a run has ended and its slot is free."""
    saved: Callable[[RunRecord, Attempt, list[Record]], None]
    """Given every `CheckpointSaved`, and an empty list when the attempt has ended. Called in a thread: it may hash."""


class SupervisedRun:
    """A run that has not ended."""

    def __init__(self, book: RunStateWriter, around: SupervisorContext, spec: RunSpec | None = None) -> None:
        self.book = book
        self.ring = Ring()
        self.gpus: tuple[str, ...] = ()
        self.due = False
        """A slot was given to it."""
        self.spec = spec
        self._around = around
        self._lock = asyncio.Lock()
        self._child: AttemptProcess | None = None
        self._watch: AttemptMonitor | None = None
        self._before = RunTotals()
        self._heard: list[Record] = []
        self._telling: asyncio.Task[Any] | None = None
        self._ended = asyncio.Event()

    @property
    def waits(self) -> bool:
        """Whether it is in the queue."""
        return self.book.phase is Phase.QUEUED and not self.due

    async def launch(self) -> None:
        """Start the next attempt, unless somebody stopped it while it waited."""
        async with self._lock:
            if self.book.phase is Phase.QUEUED:
                await self._start(await asyncio.to_thread(next_attempt, self.book.paths, self.book.record.attempt))

    async def adopt(self) -> str:
        """Go on where an earlier service was killed: `queued`, `adopted`, `again` or `ended`."""
        async with self._lock:
            await self._recall()
            try:
                self.spec = await asyncio.to_thread(self._stored_spec)
            except ConfigError as error:
                if self.book.phase is Phase.QUEUED:
                    await self._refuse(str(error), "spec")
                    return "ended"
                self.spec = RunSpec.model_validate({"runner": self.book.record.runner})
            if self.book.phase is Phase.QUEUED:
                return "queued"
            attempt = self.book.paths.attempt(self.book.record.attempt)
            plan = AttemptPlan.read(attempt) or AttemptPlan()
            self.gpus = plan.gpus
            seen = await asyncio.to_thread(_observed, attempt)
            # A warden that has written the end down may still be on its way out.
            child = AttemptProcess.adopt(attempt) if seen.exit is None else None
            if child is not None:
                await self._take_over(child, plan)
                return "adopted"
            if seen.exit is None and seen.watchdog is None and seen.trainer is None and not has_run(attempt):
                # It was killed between the decision and the deed: nothing has run, so this is not an end.
                await kill_all(str((read_json(attempt.launch) or {}).get("label", "")), None)
                self._around.spawn(self._start_again(attempt.number))
                return "again"
            await kill_all(seen.label, None)
            self._around.spawn(self._conclude(attempt, plan))
            return "ended"

    async def _recall(self) -> None:
        """Put an attempt on record that ran or runs and that a damaged life knows nothing of."""
        log = RunEventLog(self.book.paths)
        life = await asyncio.to_thread(log.read)
        found = await asyncio.to_thread(find_unrecorded_attempt, self.book.paths, life)
        if found is None:
            return
        _log.warning("%s: attempt %d of it is not in its life, which is damaged", self.book.run_id, found.number)
        reason = "found on the disk; the life of the run is damaged"
        if self.book.phase.has_process:
            await self.book.update(attempt=found.number)
            await self.book.noted("note", reason=reason)
            return
        if self.book.phase.has_ended:
            await self.book.happened(PhaseEvent.RESUMED, reason=reason, ended=None)
        began = (await asyncio.to_thread(read_json, found.process) or {}).get("started")
        at = float(began) if isinstance(began, int | float) else self._around.clock()
        await self.book.happened(
            PhaseEvent.LAUNCHED, reason=reason, at=at, attempt=found.number, started=at, ended=None
        )

    def _stored_spec(self) -> RunSpec:
        return resumed_spec(self.book.paths, RunEventLog(self.book.paths).read())

    async def stop(self, reason: str, grace_s: float | None) -> RunRecord:
        """End it; returns when nothing of it lives and its end is written down."""
        async with self._lock:
            phase = self.book.phase
            if phase.has_ended:
                raise IllegalTransition(f"{self.book.run_id} is {phase} and cannot be stopped")
            if phase is Phase.QUEUED:
                await self._end_here(PhaseEvent.STOP_ASKED, "stopped by the operator before it began", reason)
                return self.book.record
            words = "asked to stop" if reason == "operator" else f"asked to stop ({reason})"
            asking = self._around.spawn(self.book.happened(PhaseEvent.STOP_ASKED, reason=words, code=reason))
            # Who fills the disk must be stopped although nothing can be written down; that comes when it can.
            await asyncio.wait({asking}, timeout=_DISK_S)
            if asking.done() and (error := asking.exception()) is not None:
                if isinstance(error, PalaestraError):
                    raise error
                _log.error("%s: its stop could not be written down", self.book.run_id, exc_info=error)
            child = self._child
        if child is not None:
            await child.stop(reason, self._grace(child.attempt) if grace_s is None else grace_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if asking.done() else _DISK_S):
                await self._ended.wait()
        return self.book.record

    async def left(self) -> None:
        """Returns when nothing more is done for a run that has ended."""
        await self._ended.wait()

    def heard(self, attempt: int, records: list[Record]) -> None:
        """Telemetry came in."""
        if self._watch is not None:
            self._watch.wake()
        self._heard += [record for record in records if isinstance(record.event, CheckpointSaved)]
        if self._heard and (self._telling is None or self._telling.done()):
            self._telling = self._around.spawn(self._tell_saved(attempt))

    def let_go(self) -> None:
        """The service ends; the run goes on."""
        if self._child is not None:
            self._child.close()

    @property
    def _spec(self) -> RunSpec:
        return self.spec if self.spec is not None else RunSpec.model_validate({"runner": self.book.record.runner})

    async def _start(self, number: int, *, again: bool = False) -> None:
        """Whatever goes wrong, the run does not stay between two phases: it has begun, or it is refused."""
        attempt = self.book.paths.attempt(number)
        try:
            plan = await self._plan(number)
            await asyncio.to_thread(prepare_attempt, attempt, plan, self.gpus)
        except Exception as error:  # noqa: BLE001 - a runner may be anybody's
            await self._refuse(self._told(error), "preflight")
            return
        spec = self._spec
        try:
            if not again:
                facts, now = {"digest": plan.digest(), "gpus": list(self.gpus)}, self._around.clock()
                await self.book.happened(
                    PhaseEvent.LAUNCHED, facts=facts, at=now, attempt=number, started=now, ended=None
                )
            child = await AttemptProcess.launch(plan, attempt, memory_mb=spec.memory_mb, nice=spec.nice)
        except Exception as error:  # noqa: BLE001 - a slot must not be held by what never began
            await self._end_survivors(attempt)
            await self._refuse(self._told(error), "exec_failed")
            return
        await self._follow(child, AttemptPlan.of(plan, self.gpus))

    def _told(self, error: Exception) -> str:
        if isinstance(error, LaunchRefused) and error.place == "command":
            return error.reason
        if isinstance(error, PalaestraError | OSError):
            return str(error)
        _log.error("%s: could not be started", self.book.run_id, exc_info=error)
        return f"could not be started ({type(error).__name__}: {error})"

    async def _end_survivors(self, attempt: Attempt) -> None:
        found = await asyncio.to_thread(find_survivors, attempt)
        await kill_all(found.label, found.trainer)

    async def _start_again(self, number: int) -> None:
        async with self._lock:
            if self.book.phase is Phase.STOPPING:
                await self._end_here(PhaseEvent.STOPPED, "stopped by the operator before it began", "operator")
            else:
                await self._start(number, again=True)

    async def _plan(self, number: int) -> LaunchPlan:
        await asyncio.to_thread(check_no_trainer, self.book.paths)
        place = await asyncio.to_thread(self._around.place, self.book.run_id, number)
        preview = await self._around.look_ahead(self._spec, place, self.gpus)
        consent: str | None = None
        if preview.plan is not None and number > 1:
            # Who resumes a run has agreed to go on with it.
            consent = preview.plan.digest()
        else:
            notes = await asyncio.to_thread(RunEventLog(self.book.paths).read)
            consent = next((str(note.facts["consent"]) for note in notes if note.facts.get("consent")), None)
        return preview.agreed(consent)

    async def _take_over(self, child: AttemptProcess, plan: AttemptPlan) -> None:
        facts = {"warden_lives": child.watchdog is not None and child.watchdog.is_alive()}
        await self.book.noted("adopted", facts=facts)
        await self._follow(child, plan)
        if self.book.phase is Phase.STOPPING:
            request = read_status(child.attempt).stop or {}
            grace = float(request.get("grace_s", plan.stop_grace_s))
            # The request may not have reached the warden; made again it can only shorten the grace.
            waited = max(0.0, time.time() - float(request.get("asked", time.time())))
            left = max(0.0, grace - waited)
            self._around.spawn(child.stop(str(request.get("reason", "operator")), left))

    async def _follow(self, child: AttemptProcess, plan: AttemptPlan) -> None:
        self._child = child
        around, spec, record = self._around, self._spec, self.book.record
        await self.book.update(warden=child.watchdog, trainer=child.trainer)
        self._before = RunTotals.before_attempt(
            await asyncio.to_thread(RunEventLog(self.book.paths).read), child.attempt.number
        )
        around.pump.watch(self.book.run_id, child.attempt, plan.sources, spec.thin_every)
        stalled = (lambda: None) if spec.stall_action == "tell" else self._stop_stalled
        self._watch = AttemptMonitor(
            self.book,
            child,
            lambda: around.pump.progress(self.book.run_id),
            self._limits(),
            poll_s=around.alarm_every_s,
            clock=around.clock,
            totals_before=self._before,
            drift=await asyncio.to_thread(
                script_drift, around.home, around.registry, record.agent_id, record.run_id, plan.script_sha256
            ),
            on_stall=stalled,
        )
        around.spawn(self._until_ended(child, plan))

    async def _until_ended(self, child: AttemptProcess, plan: AttemptPlan) -> None:
        assert self._watch is not None
        sampling = self._around.spawn(self._sample(child))
        try:
            await self._persist(self._watch.run)
        finally:
            sampling.cancel()
        child.close()
        await self._conclude(child.attempt, plan)

    async def _persist(self, work: Callable[[], Awaitable[None]]) -> None:
        """Whatever goes wrong in watching a run, it is watched to its end."""
        while True:
            try:
                return await work()
            except Exception:  # noqa: BLE001 - a fault of ours must not lose a run
                _log.exception("%s: something went wrong while it was looked after", self.book.run_id)
                await asyncio.sleep(_TRY_AGAIN_S)

    async def _sample(self, child: AttemptProcess) -> None:
        root = child.watchdog if child.watchdog is not None and child.watchdog.is_alive() else child.trainer
        if root is None:
            return
        sampler = ResourceSampler(child.attempt, root, self.gpus, clock=self._around.clock)
        while True:
            await asyncio.to_thread(sampler.sample)
            await asyncio.sleep(self._around.sample_every_s)

    async def _conclude(self, attempt: Attempt, plan: AttemptPlan) -> None:
        await self._persist(lambda: self._write_end(attempt, plan))

    async def _write_end(self, attempt: Attempt, plan: AttemptPlan) -> None:
        if self.book.phase.has_ended:
            self._over()
            return
        around, run_id = self._around, self.book.run_id
        if around.pump.progress(run_id) is None:
            around.pump.watch(run_id, attempt, plan.sources, self._spec.thin_every)
            self._before = RunTotals.before_attempt(
                await asyncio.to_thread(RunEventLog(self.book.paths).read), attempt.number
            )
        progress = await asyncio.to_thread(around.pump.finish, run_id, _DRAIN_S)
        while self._telling is not None and not self._telling.done():
            await asyncio.wait({self._telling})
        await self._tell_saved(attempt.number)
        await asyncio.to_thread(around.saved, self.book.record, attempt, [])
        redact = Redactor.from_environment(os.environ)
        known = await asyncio.to_thread(read_exit_facts, attempt, redact)
        size = await asyncio.to_thread(size_of, self.book.paths.path)
        exit_ = read_status(attempt).exit or {}
        outcome = determine_outcome(known)
        endless = describe_missing_episodes(self._before.new_steps(progress), progress.episodes, self._limits())
        if endless and outcome.event is PhaseEvent.SUCCEEDED:
            # Whoever trains in silence ends with code 0, too; the alarm may never have been seen.
            outcome = replace(outcome, reason=endless, code="no_episodes")
        alarms = merge_alarms(self.book.record.alarms, lasting_alarms(progress, around.clock()))
        if alarms and outcome.event is PhaseEvent.SUCCEEDED and outcome.code == "exit":
            outcome = replace(outcome, reason=alarms[0].text, code=alarms[0].code)
        if self.book.phase is Phase.STARTING and (progress.seq or progress.output_bytes):
            # It was over before anybody looked.
            await self.book.happened(PhaseEvent.FIRST_SIGN)
        noted = {alarm.code for alarm in self.book.record.alarms}
        for alarm in alarms:
            if alarm.code not in noted:
                await self.book.noted("alarm", reason=alarm.text, code=alarm.code)
        if outcome.event is not PhaseEvent.SUCCEEDED:
            outcome = replace(outcome, reason=outcome.reason + await asyncio.to_thread(self._earlier_success))
        url = progress.tracking_url or self.book.record.tracking_url
        columns = {**self._before.columns_with(progress), "tracking_url": url, "bytes_on_disk": size}
        duration = exit_.get("duration_s")
        started = self.book.record.started
        # From a clock that nobody sets, where one was read: the length of a run must not depend on the wall's.
        measured = isinstance(duration, int | float) and started is not None
        ended = started + duration if measured and started is not None and duration is not None else self._unseen_end()
        await self.book.happened(
            outcome.event,
            reason=outcome.reason,
            code=outcome.code,
            facts={
                **_facts(exit_, known.last_lines, outcome),
                **columns,
                "ended": ended,
                "alarms": [asdict(alarm) for alarm in alarms],
            },
            ended=ended,
            alarms=alarms,
            **columns,
        )
        self._over()
        if progress.problem:
            around.spawn(self._drain_later(attempt, plan))

    def _earlier_success(self) -> str:
        """What an attempt that failed does not undo."""
        life = RunEventLog(self.book.paths).read()
        done = [record.attempt for record in life if record.happening == PhaseEvent.SUCCEEDED]
        return f"; attempt {done[-1]} succeeded" if done else ""

    def _unseen_end(self) -> float:
        """When an attempt ended that nobody saw exit: now, or, when that was before our time, at its last sign."""
        now = self._around.clock()
        if self._child is not None:
            return now
        attempt, signs = self.book.paths.attempt(self.book.record.attempt), []
        for path in (attempt.stdout, attempt.journal):
            with contextlib.suppress(OSError):
                signs.append(path.stat().st_mtime)
        return min(now, max([self.book.record.started or now, *signs]))

    async def _drain_later(self, attempt: Attempt, plan: AttemptPlan) -> None:
        """What did not fit on the disk when the run ended is taken in when it does."""
        around, run_id = self._around, self.book.run_id
        around.pump.watch(run_id, attempt, plan.sources, self._spec.thin_every)
        progress = await asyncio.to_thread(around.pump.finish, run_id, _DRAIN_LATER_S)
        await self.book.update(**self._before.columns_with(progress))
        await asyncio.to_thread(around.saved, self.book.record, attempt, [])

    async def _tell_saved(self, attempt: int) -> None:
        while self._heard:
            records, self._heard = self._heard, []
            paths = self.book.paths.attempt(attempt)
            await asyncio.to_thread(self._around.saved, self.book.record, paths, records)

    async def _refuse(self, reason: str, code: str) -> None:
        await self._end_here(PhaseEvent.LAUNCH_REFUSED, reason, code)

    async def _end_here(self, happening: PhaseEvent, reason: str, code: str) -> None:
        now = self._around.clock()
        try:
            if not await self.book.cancel_resume(reason):
                await self.book.happened(happening, reason=reason, code=code, ended=now)
        except OSError:
            # Its directory cannot be written; the slot must be free all the same.
            _log.exception("%s: its end could not be written down", self.book.run_id)
            phase = advance(self.book.phase, happening)
            await self.book.update(phase=phase, reason=reason, code=code, ended=now)
        finally:
            self._over()

    def _over(self) -> None:
        self._ended.set()
        self._around.over(self.book.run_id)

    def _stop_stalled(self) -> None:
        self._around.spawn(self.stop("stalled", None))

    def _limits(self) -> AlarmLimits:
        own = self._spec.no_episode_steps
        return AlarmLimits(self._spec.stall_after_s, self._around.no_episode_steps if own is None else own)

    def _grace(self, attempt: Attempt) -> float:
        if self._spec.stop_grace_s is not None:
            return self._spec.stop_grace_s
        return (AttemptPlan.read(attempt) or AttemptPlan()).stop_grace_s


def _observed(attempt: Attempt) -> AttemptStatus:
    """What there is of an attempt. Who lives and is on record nowhere is put on record again."""
    seen = read_status(attempt)
    if seen.exit is None and seen.watchdog is None and not attempt.launch.exists():
        found = find_survivors(attempt)
        if found.alive:
            write_process_record(attempt, found)
            return read_status(attempt)
    return seen


def _facts(exit_: dict[str, Any], last_lines: str, outcome: AttemptOutcome) -> dict[str, Any]:
    """What is remembered of an end beside its numbers: its cost, and what it said when it failed."""
    kept = ("returncode", "signal", "leftovers", "duration_s", "max_rss_kb", "user_s", "system_s")
    facts: dict[str, Any] = {name: exit_[name] for name in kept if name in exit_}
    if outcome.event is not PhaseEvent.SUCCEEDED and last_lines:
        facts["last_lines"] = last_lines
    return facts
