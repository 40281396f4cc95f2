"""Runs side by side: what was configured differently, and where each of them got to."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from palaestra.errors import ConfigError
from palaestra.runs.durable import read_json
from palaestra.runs.life import elapsed
from palaestra.runs.reading import RunReading
from palaestra.runs.wire import plain, run_data

__all__ = ["compare"]

_LAST_POINTS = 100
_MOST = 50
_OF_THE_RUN = ("runner", "script", "env_id", "seed", "python", "gpus", "warm_start", "track", "video", "thin_every")


def compare(reading: RunReading, names: Sequence[str]) -> dict[str, Any]:
    """Rows, differing keys of the configurations, and the mean of the last points of every metric, as plain data."""
    if not 2 <= len(names) <= _MOST:
        raise ConfigError("runs", list(names), "a comparison is of two to fifty runs", "Name two runs or more")
    records = [reading.run(name) for name in names]
    configurations, columns, numbers = [], [], []
    for record in records:
        paths = reading.paths(record.run_id)
        attempt = paths.attempt(max(1, record.attempt))
        command = read_json(attempt.command) or {}
        configurations.append(_configuration(paths.path, attempt.path))
        numbers.append(reading.recent_metrics(record.run_id, _LAST_POINTS))
        columns.append(
            {
                "run": run_data(record),
                "elapsed_s": elapsed(record.started, record.ended, time.time()),
                "script_sha256": str(command.get("script_sha256", "")),
                "versions": {str(k): str(v) for k, v in dict(command.get("versions") or {}).items()},
            }
        )
    metrics = dict.fromkeys(name for found in numbers for name in found)
    return {
        "runs": columns,
        "configuration": differences(configurations),
        "metrics": {
            name: [_mean([point.value for point in found.get(name, ())]) for found in numbers] for name in metrics
        },
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
            flat[f"{prefix}{key}"] = plain(value)
    return flat


def _configuration(run: Any, attempt: Any) -> dict[str, Any]:
    spec = read_json(run / "spec.json") or {}
    resolved = read_json(attempt / "resolved.json") or read_json(run / "resolved.json") or spec.get("config") or {}
    return {**{key: spec[key] for key in _OF_THE_RUN if key in spec}, **flattened(resolved)}


def _mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None
