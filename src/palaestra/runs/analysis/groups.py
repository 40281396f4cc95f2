"""Runs in groups of the same configuration, compared at equal steps: mean, interquartile mean and their intervals.

Runs that differ only in their seed form a group (`config_digest`). Every run is judged at the same step, because a run
that trained longer would win for that reason. A run that did not reach the step counts as missing and is named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from palaestra.errors import ConfigError
from palaestra.intervals import confidence_interval, interquartile_mean, interquartile_mean_interval
from palaestra.runs.analysis.metric_values import describe_window, mean_value, metric_name, read_points
from palaestra.runs.comparison import find_differences, read_configuration
from palaestra.runs.phase import Phase
from palaestra.runs.reader import RunReader
from palaestra.runs.record import RunRecord
from palaestra.runs.wire import API_SCHEMA, JsonObject, Number

MAX_COMPARED = 1000
_MAX_SEARCHED = 50
_MAX_NAMED = 8
_RESULT = re.compile(r"loss|return|reward|score|acc|error|success|eval|val_", re.IGNORECASE)
"""Names that are more likely to be compared than the learning rate or the use of memory."""
_IGNORED_KEYS = frozenset({"seed", "name", "exp_name"})


@dataclass(frozen=True, kw_only=True)
class RunScore:
    """The metric of one run at the common step."""

    __pydantic_config__ = API_SCHEMA

    run_id: str
    env_id: str
    phase: str
    seed: int | None
    value: Number | None
    """Null if the run did not reach the step, or has no such metric."""
    time_s: Number | None
    """Seconds from its start to the step; null for a resumed run."""
    problem: str = ""
    """Why it has no value."""


@dataclass(frozen=True, kw_only=True)
class RunGroup:
    """Runs of the same configuration. Intervals are of 95 %, and null for fewer than two runs."""

    __pydantic_config__ = API_SCHEMA

    label: str
    """`A`, `B`, … in the order of the result."""
    parameters: JsonObject
    """Keys of the configuration that differ between the groups."""
    runs: tuple[RunScore, ...]
    num_values: int
    """Number of runs that have a finite value."""
    mean: Number | None = None
    low: Number | None = None
    """Ends of the interval of the mean (Student's t)."""
    high: Number | None = None
    iqm: Number | None = None
    """Interquartile mean: of the middle half of the runs."""
    iqm_low: Number | None = None
    """Ends of its interval by a stratified bootstrap (2,000 resamples, fixed seed)."""
    iqm_high: Number | None = None
    time_s: Number | None = None
    """Mean time to the step."""
    on_front: bool = False
    """Whether no other group is as good in less time: the Pareto front."""


@dataclass(frozen=True, kw_only=True)
class GroupComparison:
    """Groups of runs at equal steps, best first."""

    __pydantic_config__ = API_SCHEMA

    metric: str
    window: str
    """What a value is: `mean of the last 100 episodes`."""
    direction: str
    step: int | None
    """The step at which all runs are compared; null if none has taken one."""
    groups: tuple[RunGroup, ...] = field(default=())
    notes: tuple[str, ...] = ()
    """What to know before believing the numbers."""
    other_metrics: tuple[str, ...] = ()
    """Metrics of the runs if none of them has `metric`, results first; empty otherwise."""


def compare_groups(
    reader: RunReader,
    records: Sequence[RunRecord],
    *,
    metric: str = "return",
    direction: Literal["maximize", "minimize"] = "maximize",
    step: int | None = None,
    pool_envs: bool = False,
) -> GroupComparison:
    """Group runs and compare them at a step (default: the largest that all runs have reached which were not cut short).

    With `pool_envs`, runs in different environments form one group if the rest of their configuration is the same, and
    the bootstrap draws within each environment. The metric should then be normalised.
    """
    if not 1 <= len(records) <= MAX_COMPARED:
        raise ConfigError("runs", len(records), f"a comparison is of 1 to {MAX_COMPARED:,} runs", "Select fewer runs")
    step = _common_step(records) if step is None else step
    members, configurations = _group(reader, records, pool_envs)
    differing = find_differences([_without_seed(config, pool_envs) for config in configurations])
    groups = []
    for index, group in enumerate(members):
        scores = tuple(_score(reader, record, metric, step) for record in group)
        parameters = {key: values[index] for key, values in differing.items()}
        groups.append(_summarize(scores, parameters))
    sign = -1 if direction == "maximize" else 1
    groups.sort(key=lambda one: (one.mean is None, sign * (one.mean or 0.0)))
    front = _pareto_front(groups, sign)
    groups = [replace(group, label=_label(index), on_front=index in front) for index, group in enumerate(groups)]
    other_metrics = () if _has_values(groups) else list_other_metrics(reader, records, metric)
    if other_metrics:
        notes = [f"no run has {metric_name(metric)}; they have {join_metrics(other_metrics)}"]
    else:
        notes = _list_notes(groups, metric, pool_envs)
    return GroupComparison(
        metric=metric_name(metric),
        window=describe_window(metric),
        direction=direction,
        step=step,
        groups=tuple(groups),
        notes=tuple(notes),
        other_metrics=other_metrics,
    )


def _has_values(groups: Sequence[RunGroup]) -> bool:
    return any(group.num_values for group in groups)


def list_other_metrics(reader: RunReader, records: Sequence[RunRecord], metric: str) -> tuple[str, ...]:
    """The metrics of some runs if none of them has `metric`; empty if one has it. Results precede other metrics."""
    names: dict[str, None] = {}
    for record in records[:_MAX_SEARCHED]:
        try:
            names |= dict.fromkeys(reader.metric_names(record.run_id))
        except ConfigError:
            continue  # archived, or its directory is gone
    if metric_name(metric) in names:
        return ()
    return tuple(sorted(names, key=lambda name: not _RESULT.search(name)))


def join_metrics(names: Sequence[str]) -> str:
    """`val_loss, train_loss and 12 more`."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _common_step(records: Sequence[RunRecord]) -> int | None:
    """A run that failed, or was stopped or pruned early, must not shorten the comparison of the others."""
    steps = [(record.env_step, is_cut_short(str(record.phase))) for record in records if record.env_step]
    return min((step for step, is_cut in steps if not is_cut), default=min((step for step, _ in steps), default=None))


def is_cut_short(phase: str) -> bool:
    """Whether a run in this phase has ended without having succeeded."""
    return Phase(phase).has_ended and phase != Phase.SUCCEEDED


def _group(
    reader: RunReader, records: Sequence[RunRecord], pool_envs: bool
) -> tuple[list[list[RunRecord]], list[JsonObject]]:
    """The runs of each group, and the configuration of its first run."""
    members: dict[object, list[RunRecord]] = {}
    configurations: dict[object, JsonObject] = {}
    for record in records:
        key: object = (record.config_digest or record.run_id, record.env_id, record.runner)
        config: JsonObject | None = None
        if pool_envs:
            config = _read_config(reader, record)
            key = (record.agent_id, repr(sorted(_without_seed(config, True).items(), key=str)))
        if key not in members:
            members[key] = []
            configurations[key] = _read_config(reader, record) if config is None else config
        members[key].append(record)
    return list(members.values()), [configurations[key] for key in members]


def _read_config(reader: RunReader, record: RunRecord) -> JsonObject:
    run = reader.home.run(record.run_id)
    config = read_configuration(run, run.attempt(max(1, record.attempt)))
    return {"runner": record.runner, "env": record.env_id, **config}


def _without_seed(config: Mapping[str, object], pool_envs: bool) -> JsonObject:
    ignored = _IGNORED_KEYS | ({"env", "env_id", "id"} if pool_envs else {"env_id"})
    # `env` stands for the environment, whatever the runner calls its key.
    named = {key: value for key, value in config.items() if key.rpartition(".")[2] not in ignored}
    return {key: value for key, value in named.items() if key != "env.id"}


def _score(reader: RunReader, record: RunRecord, metric: str, step: int | None) -> RunScore:
    points = read_points(reader, record.run_id, metric, step) if not record.archived else []
    value, problem = mean_value(points), ""
    if step is None or record.env_step < step:
        value, problem = None, f"{record.phase} at step {record.env_step:,}"
    elif value is None:
        problem = "it is archived" if record.archived else f"it has no values of {metric_name(metric)}"
    elif not math.isfinite(value):
        problem = f"its value is {value}"
    time_s = None
    if points and record.started is not None and record.attempt <= 1 and points[-1].time >= record.started:
        time_s = points[-1].time - record.started
    return RunScore(
        run_id=record.run_id,
        env_id=record.env_id,
        phase=str(record.phase),
        seed=record.seed,
        value=value,
        time_s=time_s,
        problem=problem,
    )


def _summarize(scores: tuple[RunScore, ...], parameters: JsonObject) -> RunGroup:
    strata: dict[str, list[float]] = {}
    for score in scores:
        if score.value is not None and math.isfinite(score.value):
            strata.setdefault(score.env_id, []).append(score.value)
    values = [value for stratum in strata.values() for value in stratum]
    times = [score.time_s for score in scores if score.time_s is not None and score.value is not None]
    group = RunGroup(label="", parameters=parameters, runs=scores, num_values=len(values))
    if not values:
        return group
    interval = confidence_interval(values) or (None, None)
    iqm_interval = interquartile_mean_interval(list(strata.values())) or (None, None)
    return replace(
        group,
        mean=math.fsum(values) / len(values),
        low=interval[0],
        high=interval[1],
        iqm=interquartile_mean(values),
        iqm_low=iqm_interval[0],
        iqm_high=iqm_interval[1],
        time_s=math.fsum(times) / len(times) if times else None,
    )


def _pareto_front(groups: Sequence[RunGroup], sign: int) -> Collection[int]:
    """Indices of the groups that no other group beats in value and time."""
    points = [
        (index, sign * group.mean, group.time_s)
        for index, group in enumerate(groups)
        if group.mean is not None and group.time_s is not None
    ]
    return {
        index
        for index, value, time_s in points
        if not any(
            other <= value and other_s <= time_s and (other, other_s) != (value, time_s) for _, other, other_s in points
        )
    }


def _label(index: int) -> str:
    """A to Z, then A1, B1, …"""
    turn, letter = divmod(index, 26)
    return chr(ord("A") + letter) + (str(turn) if turn else "")


def _list_notes(groups: Sequence[RunGroup], metric: str, pool_envs: bool) -> list[str]:
    notes = []
    problems = [(group.label, score) for group in groups for score in group.runs if score.problem]
    if problems:
        few = "; ".join(f"{label} {score.run_id}: {score.problem}" for label, score in problems[:3])
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        number = "1 run has" if len(problems) == 1 else f"{len(problems)} runs have"
        notes.append(f"{number} no value, which may flatter the group: {few}{more}")
    if any(group.num_values == 1 for group in groups):
        notes.append("a group of one run has no interval; use --seeds 1..5")
    envs = {score.env_id for group in groups for score in group.runs}
    if len(envs) > 1 and pool_envs and "normalized" not in metric:
        notes.append(f"{metric_name(metric)} of {len(envs)} environments is pooled; it should be normalised")
    return notes
