"""Drives sweeps in the run service: chooses trials, submits their runs to the queue, and records what came out.

All state is in the logs of the sweeps (`trial_log`), which are written before anything is done. Each step compares the
log with the runs and does what is missing, so that the next service continues after a kill at any moment.
Runs are ordinary runs: submitted, queued, stopped and resumed by the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from palaestra.errors import (
    ConfigError,
    ConsentRequired,
    HostUnreachable,
    IllegalTransition,
    LaunchRefused,
    PalaestraError,
    UnknownRun,
)
from palaestra.files.home import Home
from palaestra.redaction import redact_secrets
from palaestra.runs.analysis.metric_values import read_value
from palaestra.runs.reader import RunReader
from palaestra.runs.runner import LaunchPlan
from palaestra.runs.spec import RunSpec
from palaestra.runs.supervisor.supervisor import Supervisor
from palaestra.runs.sweeps.optuna_study import OptunaStudy, needs_optuna, open_storage, require_optuna
from palaestra.runs.sweeps.report import SweepReader, SweepRecord
from palaestra.runs.sweeps.sampling import sample_parameters
from palaestra.runs.sweeps.spec import SweepSpec
from palaestra.runs.sweeps.trial_log import SweepLog, Trial, TrialState, create_sweep, list_sweeps, read_sweep
from palaestra.runs.wire import JsonObject

if TYPE_CHECKING:
    from optuna.storages import JournalStorage

_log = logging.getLogger(__name__)
_IDLE_S = 5.0
"""Time without events after which sweeps are checked all the same."""
_PRUNING_S = _RETRY_S = 1.0
_ENDING_S = 0.05
"""A run has ended, and its last metrics are still being stored."""
_MAX_REFUSALS = 3
"""Refused runs in a row after which a sweep is stopped."""
_MAX_PREVIEWS = 20
"""Values that are tried when a sweep is created."""


@dataclass
class _ActiveSweep:
    log: SweepLog
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    study: OptunaStudy | None = None
    refusals: int = 0
    compared_to: dict[int, int] = field(default_factory=dict)
    """Step up to which a trial was compared with the others, by number."""


class SweepController:
    """The sweeps of one state directory. Use from the event loop of the supervisor."""

    def __init__(self, home: Home, supervisor: Supervisor, *, clock: Callable[[], float] = time.time) -> None:
        self._home, self._supervisor, self._clock = home, supervisor, clock
        self._runs, self.reader = RunReader(home), SweepReader(home)
        self._active: dict[str, _ActiveSweep] = {}
        self._storage: JournalStorage | None = None
        self._wake = asyncio.Event()
        self._wait_s = _IDLE_S
        self._tasks: list[asyncio.Task[None]] = []
        self._stops: dict[str, asyncio.Task[None]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a sweep has runs to submit or to wait for."""
        return bool(self._active)

    async def start(self) -> None:
        """Continue the sweeps of an earlier service. The supervisor has adopted their runs by now."""
        for log in await asyncio.to_thread(self._read_unfinished):
            self._active[log.sweep_id] = _ActiveSweep(log)
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._work())]
        self._wake.set()

    async def close(self) -> None:
        """Stop driving sweeps. Runs continue."""
        tasks = [*self._tasks, *self._stops.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def create(self, spec: SweepSpec, consent: str | None = None) -> SweepRecord:
        """Create a sweep. `consent` is the digest of the command of its first run. A refusal writes nothing."""
        if needs_optuna(spec):
            await asyncio.to_thread(require_optuna)
        values = {key: list(parameter.values) for key, parameter in spec.parameters.items()}
        if redact_secrets(values) != values:
            raise ConfigError("parameters", values, "holds a password or token and would be stored", "Leave it out")
        plan: LaunchPlan | None = None
        for parameters in _list_first_values(spec):
            run = spec.build_run(parameters, spec.run_seeds[0], "sweep")
            preview = await self._supervisor.preview(run)
            # The user agrees to the first command; the others differ in the values of the parameters.
            digest = preview.plan.digest() if plan is not None and preview.plan is not None else consent
            plan = plan or preview.require_plan(digest)
            preview.require_plan(digest)
        code = _hash_code(plan) if plan is not None and preview.needs_consent else {}
        steps = None if plan is None else plan.total_steps
        log = await asyncio.to_thread(create_sweep, self._home, spec, code, steps, self._clock())
        self._active[log.sweep_id] = _ActiveSweep(log)
        self._wake.set()
        return await asyncio.to_thread(self.reader.describe, log)

    async def stop(
        self, name: str, *, keep_running: bool = False, grace_s: float | None = None, reason: str = "by the operator"
    ) -> SweepRecord:
        """Submit no further runs, and stop the submitted ones, or with `keep_running` only those that wait."""
        log = await asyncio.to_thread(self.reader.log, name)
        sweep = self._active.get(log.sweep_id)
        if sweep is None or sweep.log.state != "running":
            raise IllegalTransition(f"{log.sweep_id} is {log.state} and cannot be stopped")
        async with sweep.lock:
            now = self._clock()
            await asyncio.to_thread(sweep.log.record_stop, reason, keep_running=keep_running, now=now)
            stops = self._stop_live_runs(sweep, grace_s)
        await asyncio.gather(*stops, return_exceptions=True)
        async with sweep.lock:
            await self._advance(sweep)
        self._wake.set()
        return await asyncio.to_thread(self.reader.describe, sweep.log)

    async def resume(self, name: str, *, retry_failed: bool = False) -> SweepRecord:
        """Continue a stopped sweep. Its stopped runs resume from their checkpoints, or are started anew without one.

        With `retry_failed`, so do the runs of trials that failed, also of a sweep that has finished.
        """
        log = await asyncio.to_thread(self.reader.log, name)
        sweep = self._active.get(log.sweep_id) or _ActiveSweep(log)
        async with sweep.lock:
            log = sweep.log
            states = ("stopped", "failed") if retry_failed else ("stopped",)
            trials = [trial for trial in log.trials.values() if trial.state in states]
            if log.state == "running" or (log.state == "finished" and not trials):
                reason = "is running" if log.state == "running" else "has finished, and no trial of it can continue"
                remedy = "" if retry_failed else ". --retry-failed continues trials that failed"
                raise IllegalTransition(f"{log.sweep_id} {reason}{remedy}")
            if needs_optuna(log.spec):
                await asyncio.to_thread(require_optuna)
            await asyncio.to_thread(log.record_resume, trials, self._clock())
            sweep.refusals = 0
            self._active[log.sweep_id] = sweep
        self._wake.set()
        return await asyncio.to_thread(self.reader.describe, log)

    # The loop

    def _read_unfinished(self) -> list[SweepLog]:
        logs = []
        for sweep_id in list_sweeps(self._home):
            try:
                log = read_sweep(self._home.sweeps / sweep_id)
            except ConfigError as error:
                _log.warning("%s", error)
                continue
            if log.state == "running" or any(log.iterate_open()):
                logs.append(log)
        return logs

    async def _listen(self) -> None:
        async for run_id, _ in self._supervisor.stream_events():
            if any(run_id.startswith(f"{sweep_id}-t") for sweep_id in self._active):
                self._wake.set()

    async def _work(self) -> None:
        while True:
            # Not `wait_for`, which loses a cancellation that arrives together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._wait_s):
                    await self._wake.wait()
            self._wake.clear()
            self._wait_s = _IDLE_S
            for sweep in list(self._active.values()):
                try:
                    async with sweep.lock:
                        await self._advance(sweep)
                except Exception:  # noqa: BLE001 - one sweep must not stop the others; the next step tries again
                    _log.exception("%s: could not be continued; trying again", sweep.log.sweep_id)
                    # Optuna's file may have been removed: open it again.
                    self._storage = sweep.study = None
                    self._wait_s = _RETRY_S

    async def _advance(self, sweep: _ActiveSweep) -> None:
        """Do what the log and the state of the runs call for. Idempotent."""
        log = sweep.log
        if sweep.study is None and needs_optuna(log.spec):
            sweep.study = await asyncio.to_thread(self._open_study, log)
        for trial in list(log.iterate_open()):
            await self._check_trial(sweep, trial)
        if log.state == "stopped":
            self._stop_live_runs(sweep, None)
        elif log.state == "running":
            await self._submit_runs(sweep)
            if log.next_number >= log.spec.num_trials and not any(log.iterate_open()):
                await asyncio.to_thread(log.record_finish, self._clock())
        if log.state != "running" and not any(log.iterate_open()):
            self._active.pop(log.sweep_id, None)

    def _open_study(self, log: SweepLog) -> OptunaStudy:
        if self._storage is None:
            self._storage = open_storage(self._home)
        return OptunaStudy(self._storage, log, log.total_steps)

    # Trials

    def _status(self, log: SweepLog, trial: Trial, seed: int | None) -> str:
        """`planned`, `refused`, `missing`, `live`, or the phase in which a run has ended."""
        run = trial.runs[seed]
        if not run.submitted:
            return "refused" if run.refused else "planned"
        status = self._submitted_status(log.run_id(trial, seed))
        return "planned" if run.resume and status not in ("live", "succeeded") else status

    def _submitted_status(self, run_id: str) -> str:
        try:
            record = self._supervisor.get_run(run_id)
        except UnknownRun:
            return "missing"
        if not record.phase.has_ended:
            return "live"
        if self._supervisor.ring(run_id) is not None:
            self._wait_s = _ENDING_S
            return "live"
        return str(record.phase)

    def _iterate_live(self, log: SweepLog) -> Iterator[str]:
        for trial in log.iterate_open():
            for seed in trial.runs:
                if self._status(log, trial, seed) == "live":
                    yield log.run_id(trial, seed)

    async def _check_trial(self, sweep: _ActiveSweep, trial: Trial) -> None:
        """Compare a trial with the others, and record its end when all of its runs have ended."""
        log = sweep.log
        if sweep.study is not None and log.spec.pruning.method != "none" and trial.pruned_at is None:
            await self._compare_trial(sweep, sweep.study, trial)
        for seed, run in trial.runs.items():
            if run.resume and self._status(log, trial, seed) in ("live", "succeeded"):
                # Resumed by a service that was killed before it recorded that, or by the user.
                await asyncio.to_thread(log.record_reopened, trial, seed, self._clock(), anew=False)
        statuses = [self._status(log, trial, seed) for seed in trial.runs]
        if trial.pruned_at is not None:
            for seed, status in zip(trial.runs, statuses, strict=True):
                if status == "live":
                    self._stop_run(log.run_id(trial, seed), "pruned", None)
        waits = "planned" in statuses and log.state == "running" and trial.pruned_at is None
        if "live" in statuses or waits:
            return
        state, values, reason = await asyncio.to_thread(self._read_outcome, log, trial, statuses)
        await asyncio.to_thread(log.record_end, trial, state, values, reason, self._clock())
        if sweep.study is not None:
            await asyncio.to_thread(sweep.study.finish, trial)

    def _read_outcome(
        self, log: SweepLog, trial: Trial, statuses: list[str]
    ) -> tuple[TrialState, dict[int | None, float], str]:
        values: dict[int | None, float] = {}
        missing = ""
        for seed, status in zip(trial.runs, statuses, strict=True):
            if status == "succeeded":
                value = read_value(self._runs, log.run_id(trial, seed), log.spec.metric)
                if value is None:
                    missing = f"{log.run_id(trial, seed)} has no values of {log.spec.metric}"
                else:
                    values[seed] = value
        if trial.pruned_at is not None:
            return "pruned", values, ""
        if set(statuses) == {"succeeded"}:
            # Without a value it cannot be ranked, but its runs did what they were asked to do.
            return "succeeded", values, missing
        if "planned" in statuses or "stopped" in statuses:
            return "stopped", values, ""
        ends = [status for status in statuses if status != "succeeded"]
        return "failed", values, f"{len(ends)} of {len(statuses)} runs {', '.join(sorted(set(ends)))}"

    async def _compare_trial(self, sweep: _ActiveSweep, study: OptunaStudy, trial: Trial) -> None:
        """Report the mean over the seeds at each step that all runs have reached; record when it is to be stopped."""
        log = sweep.log
        self._wait_s = min(self._wait_s, _PRUNING_S)
        statuses = [self._status(log, trial, seed) for seed in trial.runs]
        if not set(statuses) <= {"live", "succeeded"}:
            return
        run_ids = [log.run_id(trial, seed) for seed in trial.runs]
        records = [self._supervisor.get_run(run_id) for run_id in run_ids]
        if all(record.phase.has_ended for record in records):
            return
        reached = min(record.env_step for record in records)
        every, last = study.report_every, max(trial.reports, default=0)
        step = max(last, sweep.compared_to.get(trial.number, 0)) + every
        while step <= reached:
            values = await asyncio.to_thread(self._read_values, run_ids, log.spec.metric, step)
            if values is not None and step not in trial.reports:
                mean = math.fsum(values) / len(values)
                await asyncio.to_thread(log.record_report, trial, step, mean, self._clock())
                if await asyncio.to_thread(study.report, trial, step, mean):
                    await asyncio.to_thread(log.record_pruned, trial, step, self._clock())
                    return
            sweep.compared_to[trial.number] = step
            step += every

    def _read_values(self, run_ids: list[str], metric: str, step: int) -> list[float] | None:
        values = []
        for run_id in run_ids:
            self._supervisor.flush_series(run_id)
            value = read_value(self._runs, run_id, metric, step)
            if value is None:
                return None
            values.append(value)
        return values

    # Runs

    async def _submit_runs(self, sweep: _ActiveSweep) -> None:
        """Keep as many runs queued or running as fit, so that runs outside of the sweep get their turn as well."""
        log, spec = sweep.log, sweep.log.spec
        planner = self._supervisor.planner
        slots = sum(planner.slots_of(machine).max_running for machine in planner.list_machines(spec.base))
        limit = spec.max_unfinished or max(1, slots)
        num_live = sum(1 for _ in self._iterate_live(log))
        postponed: set[str] = set()
        while log.state == "running" and num_live < limit:
            planned = self._next_planned(log, postponed)
            if planned is not None:
                trial, seed = planned
                is_resume = trial.runs[seed].resume
                accepted = await (self._resume(log, trial, seed) if is_resume else self._submit(sweep, trial, seed))
                if accepted is None and is_resume:  # others may be on a machine that answers
                    postponed.add(log.run_id(trial, seed))
                    continue
                if accepted is None:
                    return
                num_live += accepted
            elif log.next_number < spec.num_trials:
                await asyncio.to_thread(self._add_trial, sweep)
            else:
                return

    def _next_planned(self, log: SweepLog, postponed: set[str]) -> tuple[Trial, int | None] | None:
        for trial in log.iterate_open():
            if trial.pruned_at is None:
                for seed in trial.runs:
                    if self._status(log, trial, seed) == "planned" and log.run_id(trial, seed) not in postponed:
                        return trial, seed
        return None

    def _add_trial(self, sweep: _ActiveSweep) -> None:
        log, study = sweep.log, sweep.study
        if study is not None and log.spec.sampler == "optuna":
            log.add_trial(study.ask(log.next_number), self._clock())
            return
        trial = log.add_trial(sample_parameters(log.spec, log.next_number), self._clock())
        if study is not None:
            study.add(trial)

    async def _resume(self, log: SweepLog, trial: Trial, seed: int | None) -> bool | None:
        """Resume a run; one that cannot be resumed, such as without a checkpoint, is started anew.

        Returns whether it was resumed; None if that is not possible at the moment, and it has to be tried later.
        """
        run_id = log.run_id(trial, seed)
        try:
            await self._resume_run(log, trial, seed)
        except (HostUnreachable, IllegalTransition, OSError) as error:
            # A host or a disk may come back, and a request that holds the run ends: its checkpoints are still there.
            _log.info("%s waits: %s", run_id, error)
            return None
        except PalaestraError as error:
            _log.info("%s is started anew: %s", run_id, error)
            await asyncio.to_thread(log.record_reopened, trial, seed, self._clock(), anew=True)
            return False
        await asyncio.to_thread(log.record_reopened, trial, seed, self._clock(), anew=False)
        return True

    async def _resume_run(self, log: SweepLog, trial: Trial, seed: int | None) -> None:
        """Resume a run; foreign code needs no further consent as long as it is the code that was agreed to."""
        run_id = log.run_id(trial, seed)
        try:
            await self._supervisor.resume(run_id)
        except ConsentRequired as error:
            if await self._find_consent(log, log.spec.build_run(trial.parameters, seed, log.tag)) is None:
                raise
            await self._supervisor.resume(run_id, error.digest)

    async def _submit(self, sweep: _ActiveSweep, trial: Trial, seed: int | None) -> bool | None:
        """Submit a run that may exist already, because the service was killed before it recorded that.

        Returns whether it was accepted; None if its machine does not answer, and it has to be tried later.
        """
        log = sweep.log
        run_id = log.run_id(trial, seed)
        try:
            if self._has_run(run_id):
                self._wake.set()  # it may have ended, so that no event follows
            else:
                run = log.spec.build_run(trial.parameters, seed, log.tag)
                await self._supervisor.submit(run, await self._find_consent(log, run), run_id)
        except HostUnreachable as error:
            _log.info("%s waits: %s", run_id, error)
            return None
        except (ConfigError, ConsentRequired) as error:
            await asyncio.to_thread(log.record_refused, trial, seed, str(error), self._clock())
            sweep.refusals += 1
            if sweep.refusals >= _MAX_REFUSALS:
                reason = f"{sweep.refusals} runs in a row were refused: {error}"
                await asyncio.to_thread(log.record_stop, reason, keep_running=True, now=self._clock())
            await self._check_trial(sweep, trial)
            return False
        sweep.refusals = 0
        await asyncio.to_thread(log.record_submitted, trial, seed, self._clock())
        return True

    def _has_run(self, run_id: str) -> bool:
        try:
            self._supervisor.get_run(run_id)
        except UnknownRun:
            return False
        return True

    async def _find_consent(self, log: SweepLog, run: RunSpec) -> str | None:
        """The digest of a command whose foreign code is the one that the user agreed to."""
        if not log.consent:
            return None
        plan = (await self._supervisor.preview(run)).plan
        if plan is None:
            return None  # the submission is refused with the reason
        if _hash_code(plan) != log.consent:
            reason = "has changed since the sweep was agreed to"
            raise LaunchRefused("script", plan.script_sha256[:16], reason, "Start a new sweep")
        return plan.digest()

    def _stop_live_runs(self, sweep: _ActiveSweep, grace_s: float | None) -> list[asyncio.Task[None]]:
        tasks = []
        for run_id in list(self._iterate_live(sweep.log)):
            is_queued = self._supervisor.get_run(run_id).phase == "queued"
            if is_queued or not sweep.log.keep_running:
                tasks.append(self._stop_run(run_id, "sweep stopped", grace_s))
        return tasks

    def _stop_run(self, run_id: str, reason: str, grace_s: float | None) -> asyncio.Task[None]:
        """Stop a run in the background: its trainer may need a minute to save a checkpoint."""
        task = self._stops.get(run_id)
        if task is None or task.done():
            task = self._stops[run_id] = asyncio.create_task(self._stop_and_wake(run_id, reason, grace_s))
        return task

    async def _stop_and_wake(self, run_id: str, reason: str, grace_s: float | None) -> None:
        try:
            await self._supervisor.stop(run_id, grace_s=grace_s, reason=reason)
        except PalaestraError as error:
            _log.info("%s was not stopped: %s", run_id, error)  # it has ended
        finally:
            self._stops.pop(run_id, None)
            self._wake.set()


def _hash_code(plan: LaunchPlan) -> JsonObject:
    return {"script_sha256": plan.script_sha256, "injected": [injection.sha256 for injection in plan.injected]}


def _list_first_values(spec: SweepSpec) -> list[JsonObject]:
    """The first configuration, and those that differ from it in one listed value: a mistyped value is found early."""
    first = sample_parameters(spec, 0)
    others = (
        {**first, key: value}
        for key, parameter in spec.parameters.items()
        for value in parameter.values
        if value != first[key]
    )
    return [first, *(parameters for parameters, _ in zip(others, range(_MAX_PREVIEWS), strict=False))]
