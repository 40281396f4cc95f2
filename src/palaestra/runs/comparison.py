"""Runs side by side: the configuration keys that differ, and the final values of the metrics."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palaestra.errors import ConfigError
from palaestra.files.atomic import read_json
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.runs.reader import RunReader
from palaestra.runs.record import RunRecord
from palaestra.runs.state.event_log import duration_s
from palaestra.runs.wire import API_SCHEMA, JsonObject, Number, to_json

_LAST_EPISODES = 100
_LAST_UPDATES = 10
_COUNTERS = frozenset({"env_step", "update", "episodes"})
"""Counters of progress, which the record of the run holds."""
_EVALUATED = ("eval_return", "eval_normalized_score")
_MAX_RUNS = 50
_SPEC_KEYS = ("runner", "script", "env_id", "seed", "python", "gpus", "warm_start", "track", "video", "thin_every")


@dataclass(frozen=True)
class ComparedRun:
    """One column of a comparison."""

    __pydantic_config__ = API_SCHEMA

    run: RunRecord
    elapsed_s: float
    script_sha256: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Comparison:
    """Runs side by side. Lists hold one value for each run, in the order of `runs`."""

    __pydantic_config__ = API_SCHEMA

    runs: tuple[ComparedRun, ...]
    configuration: dict[str, list[Any]]
    """Keys whose values differ; null where a run has no such key."""
    metrics: dict[str, list[Number | None]]
    """Mean of the last 100 episodes of episode metrics, and of the last 10 updates of all others."""
    evaluations: dict[str, list[Number | None]] = field(default_factory=dict)
    """`baseline`, `final` and `gain` of `eval_return` and `eval_normalized_score`: the first evaluation (of
    fine-tuning, the last one before its first step in the environment), the last one, and their difference."""


def compare(reader: RunReader, names: Sequence[str]) -> Comparison:
    """Compare two to fifty runs by their ids, or prefixes of them."""
    if not 2 <= len(names) <= _MAX_RUNS:
        raise ConfigError("runs", list(names), "a comparison is of two to fifty runs", "Name two runs or more")
    records = [reader.run(name) for name in names]
    configurations, columns, metrics, evaluations = [], [], [], []
    for record in records:
        run = reader.paths(record.run_id)
        attempt = run.attempt(max(1, record.attempt))
        command = read_json(attempt.command) or {}
        configurations.append(read_configuration(run, attempt))
        metrics.append(final_metrics(reader, record.run_id))
        evaluations.append(_read_evaluations(reader, record.run_id, metrics[-1], configurations[-1]))
        columns.append(
            ComparedRun(
                run=record,
                elapsed_s=duration_s(record.started, record.ended, time.time()),
                script_sha256=str(command.get("script_sha256", "")),
                versions={str(k): str(v) for k, v in dict(command.get("versions") or {}).items()},
            )
        )
    return Comparison(
        runs=tuple(columns),
        configuration=find_differences(configurations),
        metrics=_side_by_side(metrics),
        evaluations=_side_by_side(evaluations),
    )


def _side_by_side(columns: Sequence[Mapping[str, float | None]]) -> dict[str, list[Number | None]]:
    names = dict.fromkeys(name for values in columns for name in values)
    return {name: [values.get(name) for values in columns] for name in names}


def find_differences(configurations: Sequence[JsonObject]) -> dict[str, list[Any]]:
    """Keys with different values, in the order of the first configuration that has them."""
    keys = dict.fromkeys(key for configuration in configurations for key in configuration)
    values = {key: [configuration.get(key) for configuration in configurations] for key in keys}
    return {key: items for key, items in values.items() if len({json.dumps(item) for item in items}) > 1}


def flatten(data: Mapping[str, object], prefix: str = "") -> JsonObject:
    """Nested mappings as `section.key`."""
    flat: JsonObject = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = to_json(value)
    return flat


def read_configuration(run: RunDirectory, attempt: Attempt) -> JsonObject:
    """All values of a run with dotted keys, and the parts of its request that define it."""
    spec = read_json(run.spec) or {}
    resolved = read_json(attempt.resolved) or read_json(run.resolved) or spec.get("config") or {}
    return {**{key: spec[key] for key in _SPEC_KEYS if key in spec}, **flatten(resolved)}


def final_metrics(reader: RunReader, run_id: str) -> dict[str, float | None]:
    """Means over the last points, NaN included: a diverged loss must not compare as its last finite values."""
    metrics = {}
    for name, points in reader.recent_metrics(run_id, _LAST_EPISODES).items():
        if name not in _COUNTERS:
            last = points if name.startswith("episode/") else points[-_LAST_UPDATES:]
            metrics[name] = sum(point.value for point in last) / len(last) if last else None
    return metrics


def _read_evaluations(
    reader: RunReader, run_id: str, known: Mapping[str, object], configuration: JsonObject
) -> dict[str, float | None]:
    names = [name for name in _EVALUATED if name in known]
    if not names:
        return {}
    offline_updates = _count_offline_updates(configuration)
    all_points, before = reader.metrics(run_id, names), reader.metrics(run_id, names, last=offline_updates)
    result: dict[str, float | None] = {}
    for name, points in all_points.items():
        if not points:
            continue
        # A policy that was first evaluated after its offline phase has no baseline.
        earlier = before[name] or ([] if offline_updates else points[:1])
        baseline, final = earlier[-1].value if earlier else None, points[-1].value
        gain = None if baseline is None else final - baseline
        result |= {f"{name}/baseline": baseline, f"{name}/final": final, f"{name}/gain": gain}
    return result


def _count_offline_updates(configuration: JsonObject) -> int:
    """The steps of a run that counts its updates, up to its first step in the environment; 0 for all other runs."""
    if configuration.get("runner") != "corl":
        return 0
    from palaestra.runs.runners.corl.script import count_offline_updates

    return count_offline_updates(configuration)
