"""The trials of a sweep on disk: `sweeps/<sweep_id>/sweep.json` and `trials.jsonl`, the source of truth about it.

A trial is one configuration, and has one run for each seed. Its line is on disk before any of its runs is submitted,
and the id of a run follows from sweep, trial and seed. A service that is killed between the two finds the run, or
submits it under the same id, which can be used only once: no run is lost, and none is doubled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from palaestra.errors import ConfigError, UnknownRun
from palaestra.files.atomic import append_line, atomic_directory, read_json, write_json
from palaestra.files.home import Home
from palaestra.files.run_directory import new_run_id
from palaestra.runs.sweeps.spec import SweepSpec
from palaestra.runs.wire import JsonObject
from palaestra.strict_json import json_number, read_number

TrialState: TypeAlias = Literal["running", "succeeded", "failed", "pruned", "stopped"]
SweepState: TypeAlias = Literal["running", "stopped", "finished"]

_SWEEP_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,59}")
_MAX_STEM = 30
"""Leaves room for trial, seed and try in the ids of its runs."""


@dataclass
class TrialRun:
    """One run of a trial."""

    seed: int | None
    tries: int = 1
    """1, and one more for each time it was started anew."""
    submitted: bool = False
    refused: str = ""
    """Why it was not accepted; empty if it was."""
    resume: bool = False
    """Whether it has to be resumed, because the sweep was, unless it is running or has succeeded."""


@dataclass
class Trial:
    """One configuration."""

    number: int
    parameters: JsonObject
    runs: dict[int | None, TrialRun]
    """By seed."""
    state: TrialState = "running"
    value: float | None = None
    """Mean over the seeds; None unless all runs have succeeded."""
    values: dict[int | None, float] = field(default_factory=dict)
    """The metric of each run that has succeeded, by seed."""
    reports: dict[int, float] = field(default_factory=dict)
    """Mean over the seeds by step, as far as it was compared with other trials."""
    pruned_at: int | None = None
    """Step at which it was stopped early."""
    reason: str = ""
    """Why it failed, or has no value."""

    @property
    def has_ended(self) -> bool:
        """Whether its outcome is recorded."""
        return self.state != "running"


@dataclass
class SweepLog:
    """The stored state of one sweep; methods that record something write it to disk first."""

    path: Path
    spec: SweepSpec
    created: float
    consent: JsonObject
    """Hashes of the foreign code that the user agreed to; empty if there is none."""
    total_steps: int | None = None
    """Steps of a run."""
    trials: dict[int, Trial] = field(default_factory=dict)
    state: SweepState = "running"
    reason: str = ""
    """Why it was stopped."""
    keep_running: bool = False
    """Whether a stop let its running runs continue."""

    @property
    def sweep_id(self) -> str:
        """The name of the directory."""
        return self.path.name

    @property
    def tag(self) -> str:
        """Tag of its runs."""
        return f"sweep:{self.sweep_id}"

    def run_id(self, trial: Trial, seed: int | None) -> str:
        """The id of a run; the same one for the same trial and seed, unless the run was started anew."""
        run = trial.runs[seed]
        text = f"{self.sweep_id}-t{trial.number:04}"
        text += "" if seed is None else f"-s{seed}"
        return text if run.tries == 1 else f"{text}-r{run.tries}"

    @property
    def next_number(self) -> int:
        """Number of the next trial. A trial whose line was damaged is created again, and finds its runs."""
        return next(number for number in range(len(self.trials) + 1) if number not in self.trials)

    def iterate_open(self) -> Iterator[Trial]:
        """The trials that have not ended, in order."""
        return (trial for trial in self.trials.values() if not trial.has_ended)

    def add_trial(self, parameters: JsonObject, now: float) -> Trial:
        """Record the next trial."""
        number = self.next_number
        self._append("trial", now, number, parameters=parameters)
        return self.trials[number]

    def record_submitted(self, trial: Trial, seed: int | None, now: float) -> None:
        """Record that a run was accepted."""
        self._append("submitted", now, trial.number, seed=seed, run_id=self.run_id(trial, seed))

    def record_refused(self, trial: Trial, seed: int | None, reason: str, now: float) -> None:
        """Record that a run was refused."""
        self._append("refused", now, trial.number, seed=seed, reason=reason)

    def record_reopened(self, trial: Trial, seed: int | None, now: float, *, anew: bool) -> None:
        """Record that a run was resumed, or that it is started `anew` under another id."""
        self._append("reopened", now, trial.number, seeds=[seed], anew=[seed] if anew else [])

    def record_report(self, trial: Trial, step: int, value: float, now: float) -> None:
        """Record the mean over the seeds at a step."""
        self._append("report", now, trial.number, step=step, value=json_number(value))

    def record_pruned(self, trial: Trial, step: int, now: float) -> None:
        """Record that a trial is stopped early; its runs are stopped afterwards."""
        self._append("pruned", now, trial.number, step=step)

    def record_end(
        self, trial: Trial, state: TrialState, values: Mapping[int | None, float], reason: str, now: float
    ) -> None:
        """Record the outcome of a trial. Its value is the mean over the seeds, if all of its runs have one."""
        is_complete = state == "succeeded" and len(values) == len(trial.runs)
        mean = math.fsum(values.values()) / len(values) if is_complete else None
        self._append(
            "ended",
            now,
            trial.number,
            state=state,
            value=None if mean is None else json_number(mean),
            values=[[seed, json_number(number)] for seed, number in values.items()],
            reason=reason,
        )

    def record_stop(self, reason: str, *, keep_running: bool, now: float) -> None:
        """Record that no further runs are submitted."""
        self._append("stopped", now, reason=reason, keep_running=keep_running)

    def record_resume(self, trials: Sequence[Trial], now: float) -> None:
        """Record that a stopped sweep continues, and that the runs of these trials have to be resumed."""
        self._append("resumed", now, trials=[trial.number for trial in trials])

    def record_finish(self, now: float) -> None:
        """Record that all trials have ended."""
        self._append("finished", now)

    def _append(self, kind: str, now: float, number: int | None = None, **fields: object) -> None:
        line = {"kind": kind, "time": now, **({} if number is None else {"trial": number}), **fields}
        append_line(self.path / "trials.jsonl", line, durable=True)
        self._apply(line)

    def _apply(self, line: JsonObject) -> None:
        kind = line["kind"]
        if kind in ("stopped", "resumed", "finished"):
            self.state = "running" if kind == "resumed" else kind
            self.reason = str(line.get("reason", ""))
            self.keep_running = bool(line.get("keep_running"))
            for number in line.get("trials", ()):
                self._reopen(self.trials[int(number)])
            return
        number = int(line["trial"])
        if kind == "trial":
            runs = {seed: TrialRun(seed) for seed in self.spec.run_seeds}
            self.trials[number] = Trial(number, dict(line["parameters"]), runs)
            return
        self._apply_to_trial(self.trials[number], kind, line)

    def _reopen(self, trial: Trial) -> None:
        trial.state, trial.value, trial.values, trial.reason, trial.pruned_at = "running", None, {}, "", None
        for run in trial.runs.values():
            run.refused, run.resume = "", run.submitted

    def _apply_to_trial(self, trial: Trial, kind: str, line: JsonObject) -> None:
        if kind == "report":
            trial.reports[int(line["step"])] = read_number(line["value"])
        elif kind == "pruned":
            trial.pruned_at = int(line["step"])
        elif kind == "ended":
            trial.state = line["state"]
            trial.value = None if line["value"] is None else read_number(line["value"])
            trial.values = {seed: read_number(value) for seed, value in line["values"]}
            trial.reason = str(line.get("reason", ""))
        elif kind == "reopened":
            if "seeds" not in line:  # of an earlier version, whose line `resumed` does not name the trials
                self._reopen(trial)
            for seed in line.get("seeds", trial.runs):
                trial.runs[seed].resume = False
            for seed in line["anew"]:
                trial.runs[seed].submitted = False
                trial.runs[seed].tries += 1
        elif kind in ("submitted", "refused"):
            run = trial.runs[line["seed"]]
            run.submitted = kind == "submitted"
            run.refused = str(line["reason"]) if kind == "refused" else ""


def create_sweep(home: Home, spec: SweepSpec, consent: JsonObject, total_steps: int | None, now: float) -> SweepLog:
    """Create the directory of a sweep. It is durable when this returns."""
    base = spec.base
    stem = (base.name or base.env_id or base.script or base.runner)[:_MAX_STEM]
    path = home.sweeps / new_run_id(f"{stem}-sweep")
    with atomic_directory(path) as directory:
        facts = {"created": now, "consent": consent, "total_steps": total_steps}
        write_json(
            directory / "sweep.json", {"schema": 1, **facts, "spec": spec.model_dump(mode="json")}, durable=False
        )
    return SweepLog(path, spec, now, consent, total_steps)


def read_sweep(path: Path) -> SweepLog:
    """The stored state of a sweep. `ConfigError` if it cannot be read. Damaged lines are skipped."""
    document = read_json(path / "sweep.json")
    try:
        if document is None:
            raise ValueError("sweep.json is missing or damaged")
        spec = SweepSpec.model_validate(document["spec"])
        consent, total_steps = dict(document["consent"]), document.get("total_steps")
        log = SweepLog(path, spec, float(document["created"]), consent, total_steps)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError("sweep", path.name, f"cannot be read ({error})", "Restore its directory") from None
    try:
        lines = (path / "trials.jsonl").read_bytes().split(b"\n")
    except FileNotFoundError:
        return log
    for line in lines:
        try:
            log._apply(json.loads(line))
        except (KeyError, TypeError, ValueError):
            continue  # torn by a crash: what it announced had not begun
    return log


def list_sweeps(home: Home) -> list[str]:
    """The ids of all sweeps, oldest first."""
    try:
        names = [path.name for path in home.sweeps.iterdir() if _SWEEP_ID.fullmatch(path.name) and path.is_dir()]
    except FileNotFoundError:
        return []
    return sorted(names, key=lambda name: (name.rsplit("-", 3)[1:], name))


def find_sweep(home: Home, name: str) -> Path:
    """The directory of a sweep by its id, or a unique prefix of it. `UnknownRun` otherwise."""
    known = list_sweeps(home)
    matches = [name] if name in known else [sweep_id for sweep_id in known if name and sweep_id.startswith(name)]
    if len(matches) == 1:
        return home.sweeps / matches[0]
    if matches:
        raise UnknownRun("sweep", name, "is a prefix of several sweeps", f"Which of {', '.join(matches[:5])}?")
    raise UnknownRun("sweep", name, "no such sweep", "palaestra sweeps list shows them")
