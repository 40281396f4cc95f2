"""One number for a metric of a run: the mean of its last values, at its end or at a given step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from palaestra.errors import ConfigError
from palaestra.runs.reader import RunReader
from palaestra.runs.series import MetricPoint

_EPISODES = 100
_UPDATES = 10
_ALIASES = {"return": "episode/return", "length": "episode/length"}


def metric_name(name: str) -> str:
    """The stored name of a metric: `return` is `episode/return`."""
    return _ALIASES.get(name, name)


def metric_window(name: str) -> int:
    """Number of values that are averaged: 100 episodes, 1 evaluation, 10 updates of everything else."""
    if metric_name(name).startswith("episode/"):
        return _EPISODES
    return 1 if name.startswith("eval") else _UPDATES


def read_points(reader: RunReader, run_id: str, metric: str, step: int | None = None) -> list[MetricPoint]:
    """The last values of a metric, up to a step if given; empty if the run has no such metric or its files are gone."""
    name = metric_name(metric)
    try:
        return reader.recent_metrics(run_id, metric_window(metric), [name], last=step)[name]
    except ConfigError:
        return []


def mean_value(points: Sequence[MetricPoint]) -> float | None:
    """The mean of some points; None without points, NaN if one of them is."""
    return math.fsum(point.value for point in points) / len(points) if points else None


def read_value(reader: RunReader, run_id: str, metric: str, step: int | None = None) -> float | None:
    """The mean of the last values of a metric, up to a step if given; None if there are none."""
    return mean_value(read_points(reader, run_id, metric, step))


def describe_window(metric: str) -> str:
    """`mean of the last 100 episodes`."""
    window = metric_window(metric)
    if window == 1:
        return "last evaluation"
    return f"mean of the last {window} {'episodes' if window == _EPISODES else 'updates'}"
