"""The state of a sweep for people and programs: progress, trials, and the best configuration with its interval."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from palaestra.errors import ConfigError
from palaestra.files.home import Home
from palaestra.intervals import confidence_interval
from palaestra.runs.phase import Phase
from palaestra.runs.reader import RunReader
from palaestra.runs.sweeps.trial_log import SweepLog, Trial, find_sweep, list_sweeps, read_sweep
from palaestra.runs.wire import API_SCHEMA, JsonObject, Number


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """One configuration of a sweep."""

    __pydantic_config__ = API_SCHEMA

    number: int
    parameters: JsonObject
    state: str
    """`running` (or waiting), `succeeded`, `failed` (a run failed or was refused), `pruned` or `stopped`."""
    run_ids: tuple[str, ...]
    """Its runs that were submitted, one for each seed."""
    value: Number | None = None
    """Mean of the metric over the seeds; null unless all of its runs have succeeded."""
    low: Number | None = None
    """Lower end of the 95 % interval of the mean (Student's t); null for fewer than two seeds."""
    high: Number | None = None
    values: tuple[Number, ...] = ()
    """The metric of each run that has succeeded, in the order of the seeds."""
    pruned_at: int | None = None
    """Step at which it was stopped early."""
    reason: str = ""
    """Why it failed or has no value, or why a run was refused."""


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """One sweep in its current state."""

    __pydantic_config__ = API_SCHEMA

    sweep_id: str
    state: str
    """`running`, `stopped` or `finished`."""
    reason: str
    """Why it was stopped; empty otherwise."""
    created: float
    sampler: str
    metric: str
    direction: str
    seeds: tuple[int, ...]
    num_trials: int
    """Number of configurations that it will have."""
    trials: dict[str, int]
    """Number of trials by state; those that have not been chosen yet are not counted."""
    num_runs: int
    """Number of runs that it will have."""
    runs: dict[str, int]
    """Number of runs of trials that have not ended, by phase."""
    best: TrialRecord | None = None
    """The succeeded trial with the best mean. The best of many is biased upwards: confirm it with new seeds."""
    num_tied: int = 0
    """Succeeded trials, besides the best, whose 95 % interval overlaps that of the best."""


@dataclass(frozen=True, kw_only=True)
class SweepDetails:
    """A sweep with all its trials, best first; those without a value follow by number."""

    __pydantic_config__ = API_SCHEMA

    sweep: SweepRecord
    parameters: JsonObject
    """The values that each key may take."""
    trials: tuple[TrialRecord, ...] = field(default=())


class SweepReader:
    """Reads sweeps from their directories; needs no service."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._reader = RunReader(home)

    def sweeps(self) -> list[SweepRecord]:
        """All sweeps, newest first. Those that cannot be read are left out."""
        records = []
        for sweep_id in reversed(list_sweeps(self.home)):
            try:
                records.append(self.describe(read_sweep(self.home.sweeps / sweep_id)))
            except ConfigError:
                continue
        return records

    def sweep(self, name: str) -> SweepDetails:
        """The sweep with this id or unique prefix of an id; `UnknownRun` otherwise."""
        log = self.log(name)
        records = sorted((describe_trial(log, trial) for trial in log.trials.values()), key=_rank(log))
        parameters = {
            key: parameter.model_dump(mode="json", exclude_defaults=True)
            for key, parameter in log.spec.parameters.items()
        }
        return SweepDetails(sweep=self.describe(log), parameters=parameters, trials=tuple(records))

    def log(self, name: str) -> SweepLog:
        """The stored state of a sweep by its id, or a unique prefix of it."""
        return read_sweep(find_sweep(self.home, name))

    def describe(self, log: SweepLog) -> SweepRecord:
        """The current state of a sweep."""
        runs = Counter(str(self._phase(log, trial, seed)) for trial in log.iterate_open() for seed in trial.runs)
        ranked = sorted((describe_trial(log, t) for t in log.trials.values() if _has_value(t)), key=_rank(log))
        best = ranked[0] if ranked else None
        return SweepRecord(
            sweep_id=log.sweep_id,
            state=log.state,
            reason=log.reason,
            created=log.created,
            sampler=log.spec.sampler,
            metric=log.spec.metric,
            direction=log.spec.direction,
            seeds=log.spec.seeds,
            num_trials=log.spec.num_trials,
            trials=dict(Counter(trial.state for trial in log.trials.values())),
            num_runs=log.spec.num_runs,
            runs=dict(runs),
            best=best,
            num_tied=sum(_overlap(best, other) for other in ranked[1:]) if best is not None else 0,
        )

    def _phase(self, log: SweepLog, trial: Trial, seed: int | None) -> Phase | str:
        if not trial.runs[seed].submitted:
            return "refused" if trial.runs[seed].refused else "planned"
        try:
            phase = self._reader.run(log.run_id(trial, seed)).phase
        except ConfigError:
            return "missing"
        waits = trial.runs[seed].resume and phase.has_ended and phase is not Phase.SUCCEEDED
        return "planned" if waits else phase


def describe_trial(log: SweepLog, trial: Trial) -> TrialRecord:
    """A trial with the interval over its seeds."""
    values = tuple(trial.values[seed] for seed in trial.runs if seed in trial.values)
    finite = trial.value is not None and all(map(math.isfinite, values))
    interval = confidence_interval(values) if finite else None
    return TrialRecord(
        number=trial.number,
        parameters=trial.parameters,
        state=trial.state,
        run_ids=tuple(log.run_id(trial, seed) for seed, run in trial.runs.items() if run.submitted),
        value=trial.value,
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        values=values,
        pruned_at=trial.pruned_at,
        reason=next((run.refused for run in trial.runs.values() if run.refused), trial.reason),
    )


def _has_value(trial: Trial) -> bool:
    return trial.state == "succeeded" and trial.value is not None and math.isfinite(trial.value)


def _rank(log: SweepLog) -> Any:
    sign = -1 if log.spec.direction == "maximize" else 1

    def key(record: TrialRecord) -> tuple[bool, float, int]:
        has_value = record.state == "succeeded" and record.value is not None and math.isfinite(record.value)
        return not has_value, sign * (record.value or 0.0) if has_value else 0.0, record.number

    return key


def _overlap(a: TrialRecord, b: TrialRecord) -> bool:
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return False
    return a.low <= b.high and b.low <= a.high
