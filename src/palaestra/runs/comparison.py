"""Runs side by side: what was configured differently, and where each of them got to."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from palaestra.errors import ConfigError
from palaestra.files.atomic import read_json
from palaestra.runs.reader import RunReader
from palaestra.runs.state.event_log import duration_s
from palaestra.runs.wire import to_json

__all__ = ["compare"]

_LAST_EPISODES = 100
_LAST_UPDATES = 10
_COUNTERS = frozenset({"env_step", "update", "episodes"})
"""They say how long a run was, which its row does better."""
_MOST = 50
_OF_THE_RUN = ("runner", "script", "env_id", "seed", "python", "gpus", "warm_start", "track", "video", "thin_every")


def compare(reading: RunReader, names: Sequence[str]) -> dict[str, Any]:
    """Rows, differing keys of the configurations, and what every metric was in the end, as to_json data.

    That is the mean of the last 100 episodes, and of the last 10 updates for everything else.
    """
    if not 2 <= len(names) <= _MOST:
        raise ConfigError("runs", list(names), "a comparison is of two to fifty runs", "Name two runs or more")
    records = [reading.run(name) for name in names]
    configurations, columns, numbers = [], [], []
    for record in records:
        paths = reading.paths(record.run_id)
        attempt = paths.attempt(max(1, record.attempt))
        command = read_json(attempt.command) or {}
        configurations.append(_configuration(paths.path, attempt.path))
        numbers.append(_last_numbers(reading, record.run_id))
        columns.append(
            {
                "run": to_json(record),
                "elapsed_s": duration_s(record.started, record.ended, time.time()),
                "script_sha256": str(command.get("script_sha256", "")),
                "versions": {str(k): str(v) for k, v in dict(command.get("versions") or {}).items()},
            }
        )
    names_of_metrics = dict.fromkeys(name for found in numbers for name in found)
    return {
        "runs": columns,
        "configuration": differences(configurations),
        "metrics": {name: [to_json(found.get(name)) for found in numbers] for name in names_of_metrics},
    }


def differences(configurations: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Keys whose values are not the same everywhere, in the order of the first that has them."""
    keys = dict.fromkeys(key for configuration in configurations for key in configuration)
    found = {key: [configuration.get(key) for configuration in configurations] for key in keys}
    return {key: values for key, values in found.items() if len({json.dumps(value) for value in values}) > 1}


def flattened(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as `section.key`."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = to_json(value)
    return flat


def _configuration(run: Any, attempt: Any) -> dict[str, Any]:
    spec = read_json(run / "spec.json") or {}
    resolved = read_json(attempt / "resolved.json") or read_json(run / "resolved.json") or spec.get("config") or {}
    return {**{key: spec[key] for key in _OF_THE_RUN if key in spec}, **flattened(resolved)}


def _last_numbers(reading: RunReader, run_id: str) -> dict[str, float | None]:
    found = {}
    for name, points in reading.recent_metrics(run_id, _LAST_EPISODES).items():
        if name not in _COUNTERS:
            last = points if name.startswith("episode/") else points[-_LAST_UPDATES:]
            found[name] = _mean([point.value for point in last])
    return found


def _mean(values: Sequence[float]) -> float | None:
    """NaN and infinities are part of it: a loss that has diverged must not compare as its last finite values."""
    return sum(values) / len(values) if values else None
