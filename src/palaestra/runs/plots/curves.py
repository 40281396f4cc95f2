"""Learning curves of groups of runs: the mean over the runs at each step, with its 95 % interval as a band."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from palaestra.errors import ConfigError
from palaestra.runs.analysis.groups import GroupComparison, RunGroup, is_cut_short
from palaestra.runs.analysis.metric_values import metric_window
from palaestra.runs.reader import RunReader

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

GRID_POINTS = 200
MIN_BAND_RUNS = 3
"""Runs of a group from which a band is drawn. The interval of two runs is 13 times as wide as their distance."""
_MAX_POINTS = 100_000


@dataclass(frozen=True)
class RunLine:
    """The smoothed metric of one run at the steps of the grid that it has reached."""

    run_id: str
    values: tuple[float, ...]
    """NaN where there is no value."""


@dataclass(frozen=True)
class GroupCurve:
    """One group: lists have one value for each step of the grid, NaN where there is none."""

    label: str
    parameters: Mapping[str, object]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    """Ends of the 95 % interval of the mean (Student's t); NaN for fewer than three runs."""
    high: tuple[float, ...]
    lines: tuple[RunLine, ...]

    @property
    def has_band(self) -> bool:
        """Whether there are enough runs for a band."""
        return any(math.isfinite(value) for value in self.low)


@dataclass(frozen=True)
class CurveSet:
    """Curves of several groups on a common grid of steps."""

    metric: str
    steps: tuple[int, ...]
    curves: tuple[GroupCurve, ...]
    x_label: str = "environment steps"


def build_curves(reader: RunReader, comparison: GroupComparison) -> CurveSet:
    """The curves of all groups. `ConfigError` if no run has a value of the metric."""
    series = {
        score.run_id: _read_series(reader, score.run_id, comparison.metric)
        for group in comparison.groups
        for score in group.runs
    }
    last = max((int(steps[-1]) for steps, _ in series.values() if len(steps)), default=0)
    if not last:
        raise ConfigError(
            "metric", comparison.metric, "none of these runs has values of it", "Choose another with --by"
        )
    count = min(GRID_POINTS, last)
    grid = tuple(round(last * index / count) for index in range(1, count + 1))
    window = metric_window(comparison.metric)
    smoothed = {run_id: _sample(*points, grid, window) for run_id, points in series.items()}
    curves = tuple(_build_curve(group, smoothed) for group in comparison.groups)
    has_envs = any(score.env_id for group in comparison.groups for score in group.runs)
    # The steps of a script without an environment are what it calls steps, such as updates or epochs.
    return CurveSet(comparison.metric, grid, curves, "environment steps" if has_envs else "steps")


def _read_series(reader: RunReader, run_id: str, metric: str) -> tuple[Array, Array]:
    import numpy as np

    try:
        # Beyond this many points, neighbours are represented by their first, lowest, highest and last.
        points = reader.metrics(run_id, [metric], points=_MAX_POINTS)[metric]
    except ConfigError:
        points = []
    steps = np.array([point.step for point in points], dtype=np.float64)
    return steps, np.array([point.value for point in points], dtype=np.float64)


def _sample(steps: Array, values: Array, grid: Sequence[int], window: int) -> Array:
    """Means over the last `window` points at each step of the grid; NaN before the first and after the last point."""
    import numpy as np

    result = np.full(len(grid), np.nan)
    if not len(steps):
        return result
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    bad = np.concatenate([[0], np.cumsum(~finite)])
    ends = np.searchsorted(steps, np.asarray(grid), side="right")
    starts = np.maximum(0, ends - window)
    has_value = (ends > 0) & (np.asarray(grid) <= _next_step(grid, steps[-1]))
    clean = has_value & (bad[ends] == bad[starts])
    result[clean] = (sums[ends] - sums[starts])[clean] / (ends - starts)[clean]
    return result


def _next_step(grid: Sequence[int], last: float) -> int:
    """The first step of the grid that is not before the last point of a run, so that its end is drawn."""
    return next((step for step in grid if step >= last), grid[-1])


def _build_curve(group: RunGroup, smoothed: Mapping[str, Array]) -> GroupCurve:
    import numpy as np
    from scipy.special import stdtrit

    lines = [(score, smoothed[score.run_id]) for score in group.runs]
    # Runs that were cut short are drawn, and would otherwise end the curve of their group.
    counted = [values for score, values in lines if not is_cut_short(score.phase)] or [values for _, values in lines]
    table = np.array(counted)
    # A mean over fewer runs than before would jump for that reason, so it ends with the shortest run.
    mean = table.mean(axis=0)
    half = np.full(len(mean), np.nan)
    if len(table) >= MIN_BAND_RUNS:
        half = stdtrit(len(table) - 1, 0.975) * table.std(axis=0, ddof=1) / math.sqrt(len(table))
    return GroupCurve(
        label=group.label,
        parameters=group.parameters,
        mean=tuple(mean.tolist()),
        low=tuple((mean - half).tolist()),
        high=tuple((mean + half).tolist()),
        lines=tuple(RunLine(score.run_id, tuple(values.tolist())) for score, values in lines),
    )
