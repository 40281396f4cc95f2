"""Curves of runs: points from the service, new points as they arrive, and the lines that a chart draws from them.

The service sends any range of a curve in a bounded number of points that keep its extremes, so a curve of ten million
points costs as much as one of two thousand. Points that arrive live are appended and, when there are too many, thinned
the same way. As in the service, the points of a resumed run replace those that it made before from their step on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from palaestra.runs.series import MetricPoint
from palaestra.studio.model.revision import Revised

Floats: TypeAlias = NDArray[np.float64]
XAxis: TypeAlias = Literal["step", "time", "episode"]
_Points: TypeAlias = NDArray[np.float64]
"""Rows of step, value and time. The steps do not decrease."""
MAX_POINTS = 4096
"""Points of a curve that are kept; the service sends at most half of them."""
REQUEST_POINTS = 2000
_GRID = 400
"""Places at which the curves of a group are compared."""
_MAX_EXPONENT = 400.0
"""Powers of the smoothing weight stay above exp(-400), far from the smallest float."""


@dataclass(frozen=True)
class ChartOptions:
    """How all charts are drawn."""

    x_axis: XAxis = "step"
    smoothing: float = 0.0
    """Weight of the past, from 0 to below 1."""
    log_scale: bool = False
    grouped: bool = False
    """Whether runs that differ in their seed only are one line with a band."""


@dataclass(frozen=True)
class ChartLine:
    """What a chart draws: a line, and a band around it for a group of runs."""

    key: str
    label: str
    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None
    raw: Floats | None = None
    """The line before smoothing."""


class Curve:
    """One metric of one run."""

    def __init__(self) -> None:
        self._points: _Points = np.empty((0, 3))
        self._detail: _Points = np.empty((0, 3))
        self._new: list[MetricPoint] = []

    def __len__(self) -> int:
        return len(self._points) + len(self._new)

    def set_points(self, points: Sequence[MetricPoint]) -> None:
        """The whole curve, from the service. Points that arrived meanwhile and are newer stay."""
        self._fold()
        known, whole = self._points, _as_array(points)
        if len(whole):
            # By time: the points of a resumed run are newer than those that it made before at later steps.
            step, _, time = whole[-1]
            known = known[(known[:, 2] > time) | ((known[:, 2] == time) & (known[:, 0] > step))]
        self._points = np.concatenate([whole, known])

    def set_detail(self, points: Sequence[MetricPoint]) -> None:
        """A part of the curve in more detail, for a chart that shows only this part."""
        self._detail = _as_array(points)

    def append(self, points: Iterable[MetricPoint]) -> None:
        """New points, in their order. Points that are already known are not doubled."""
        self._new.extend(points)

    def arrays(self) -> tuple[Floats, Floats, Floats]:
        """Steps, values and times: the whole curve, with the detail where there is some."""
        self._fold()
        points = self._points
        if len(self._detail):
            first, last = self._detail[0, 0], self._detail[-1, 0]
            before, after = points[points[:, 0] < first], points[points[:, 0] > last]
            points = np.concatenate([before, self._detail, after])
        return points[:, 0], points[:, 1], points[:, 2]

    def _fold(self) -> None:
        """Put the new points behind the others."""
        if not self._new:
            return
        points = np.concatenate([self._points, _as_array(self._new)])
        self._new = []
        steps = points[:, 0]
        is_kept = steps <= np.minimum.accumulate(steps[::-1])[::-1]
        if not is_kept.all():  # the run was resumed from an earlier step
            points, self._detail = points[is_kept], self._detail[:0]
        self._points = _thin(_drop_repeated(points))


@dataclass(frozen=True)
class CurveSource:
    """A run as the charts know it."""

    run_id: str
    label: str
    group: str
    """Runs with the same group differ in their seed only."""
    started: float = 0.0


class Charts(Revised):
    """The curves of the selected runs, and how they are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.options = ChartOptions()
        self.sources: tuple[CurveSource, ...] = ()
        self._curves: dict[tuple[str, str], Curve] = {}

    def set_sources(self, sources: Sequence[CurveSource]) -> None:
        """Choose the runs to draw; the curves of others are forgotten."""
        chosen = {source.run_id for source in sources}
        if tuple(sources) != self.sources:
            self.sources = tuple(sources)
            self._curves = {key: curve for key, curve in self._curves.items() if key[0] in chosen}
            self.touch()

    def set_options(self, **changes: object) -> None:
        """Change how the charts are drawn."""
        changed = replace(self.options, **changes)  # type: ignore[arg-type]
        if changed != self.options:
            self.options = changed
            self.touch()

    def set_curve(self, run_id: str, metric: str, points: Sequence[MetricPoint]) -> None:
        """A whole curve has arrived; that of a run that is no longer chosen is not kept."""
        if self._is_chosen(run_id):
            self._curve(run_id, metric).set_points(points)
            self.touch()

    def set_detail(self, run_id: str, metric: str, points: Sequence[MetricPoint]) -> None:
        """A part of a curve has arrived in more detail."""
        if self._is_chosen(run_id):
            self._curve(run_id, metric).set_detail(points)
            self.touch()

    def append(self, run_id: str, points: Mapping[str, Sequence[MetricPoint]]) -> None:
        """New points of a run; curves that no chart shows are not kept."""
        is_changed = False
        for metric, new in points.items():
            curve = self._curves.get((run_id, metric))
            if curve is not None:
                curve.append(new)
                is_changed = True
        if is_changed:
            self.touch()

    def has_curve(self, run_id: str, metric: str) -> bool:
        """Whether a curve was requested or has arrived."""
        return (run_id, metric) in self._curves

    def discard(self, run_id: str, metrics: Iterable[str]) -> None:
        """Forget curves whose points could not be read."""
        for metric in metrics:
            self._curves.pop((run_id, metric), None)

    def expect(self, run_id: str, metric: str) -> None:
        """Note that a curve was requested, so that new points are kept from now on."""
        self._curve(run_id, metric)

    def lines(self, metric: str) -> list[ChartLine]:
        """The lines of a metric. By episode, runs that do not count their episodes have none."""
        lines = []
        for source in self.sources:
            curve = self._curves.get((source.run_id, metric))
            if curve is None or not len(curve):
                continue
            step, value, time = curve.arrays()
            x = self._x(source, step, time)
            if x is not None:
                lines.append((source, x, value))
        if self.options.grouped:
            return self._group(lines)
        return [self._smooth(ChartLine(source.run_id, source.label, x, y)) for source, x, y in lines]

    def table(self, metric: str) -> list[tuple[str, float, float]]:
        """Label, x and y of every point that is drawn, for an export."""
        return [
            (line.label, float(x), float(y)) for line in self.lines(metric) for x, y in zip(line.x, line.y, strict=True)
        ]

    def _curve(self, run_id: str, metric: str) -> Curve:
        return self._curves.setdefault((run_id, metric), Curve())

    def _is_chosen(self, run_id: str) -> bool:
        return any(source.run_id == run_id for source in self.sources)

    def _x(self, source: CurveSource, step: Floats, time: Floats) -> Floats | None:
        if self.options.x_axis == "time":
            return time - (source.started or time[0])
        if self.options.x_axis == "episode":
            episodes = self._curves.get((source.run_id, "episodes"))
            if episodes is None or not len(episodes):
                return None
            at, count, _ = episodes.arrays()
            return np.interp(step, at, count)
        return step

    def _smooth(self, line: ChartLine) -> ChartLine:
        if self.options.smoothing <= 0:
            return line
        return replace(line, y=smooth(line.y, self.options.smoothing), raw=line.y)

    def _group(self, lines: Sequence[tuple[CurveSource, Floats, Floats]]) -> list[ChartLine]:
        groups: dict[str, list[tuple[CurveSource, Floats, Floats]]] = {}
        for source, x, y in lines:
            groups.setdefault(source.group, []).append((source, x, y))
        result = []
        for key, members in groups.items():
            if len(members) == 1:
                source, x, y = members[0]
                result.append(self._smooth(ChartLine(key, source.label, x, y)))
                continue
            label = f"{members[0][0].label} and {len(members) - 1} more"
            result.append(combine_lines(key, label, [(x, y) for _, x, y in members], self.options.smoothing))
        return result


def combine_lines(key: str, label: str, lines: Sequence[tuple[Floats, Floats]], smoothing: float = 0.0) -> ChartLine:
    """The mean of several lines and the band of one standard deviation, at each place of the lines that reach it."""
    first, last = min(float(x[0]) for x, _ in lines), max(float(x[-1]) for x, _ in lines)
    grid = np.linspace(first, last, _GRID if last > first else 1)
    values = np.stack([_sample(grid, x, smooth(y, smoothing)) for x, y in lines])
    is_known = np.isfinite(values)
    count = is_known.sum(axis=0)
    grid, values, is_known, count = grid[count > 0], values[:, count > 0], is_known[:, count > 0], count[count > 0]
    mean = np.where(is_known, values, 0.0).sum(axis=0) / count
    spread = np.sqrt(np.where(is_known, (values - mean) ** 2, 0.0).sum(axis=0) / count)
    return ChartLine(key, label, grid, mean, mean - spread, mean + spread)


def short_number(value: float) -> str:
    """A large number in few characters: 200k, 1.5M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.6g}{unit}"
    return f"{value:.6g}"


def smooth(values: Floats, weight: float) -> Floats:
    """Exponential moving average without the bias towards the first value; values that are not finite are passed over.

    average(n) = (1 - w) * (v(n) + w * v(n - 1) + w² * v(n - 2) + …) / (1 - wⁿ)
    """
    if not 0 < weight < 1:
        return values
    is_finite = np.isfinite(values)
    finite = values[is_finite]
    sums, carry = np.empty(len(finite)), 0.0
    size = max(1, int(_MAX_EXPONENT / -math.log(weight)))
    for start in range(0, len(finite), size):
        part = finite[start : start + size]
        powers = weight ** np.arange(1, len(part) + 1)
        sums[start : start + size] = powers * (carry + (1 - weight) * np.cumsum(part / powers))
        carry = sums[start + len(part) - 1]
    averages = sums / (1 - weight ** np.arange(1, len(finite) + 1))
    newest = np.cumsum(is_finite) - 1
    result: Floats = np.where(newest >= 0, np.append(averages, np.nan)[newest], values)
    return result


def _sample(grid: Floats, x: Floats, y: Floats) -> Floats:
    """The values of a line at the places of a grid; NaN where it does not reach."""
    is_finite = np.isfinite(y)
    if not is_finite.any():
        return np.full(len(grid), np.nan)
    return np.interp(grid, x[is_finite], y[is_finite], left=np.nan, right=np.nan)


def _as_array(points: Sequence[MetricPoint]) -> _Points:
    return np.array(points, np.float64).reshape(-1, 3)


def _drop_repeated(points: _Points) -> _Points:
    """Points that were sent twice, once."""
    is_same = (points[1:] == points[:-1]) | (np.isnan(points[1:]) & np.isnan(points[:-1]))
    distinct: _Points = points[np.append(True, ~is_same.all(axis=1))]
    return distinct


def thin_line(x: Floats, y: Floats, stretches: int) -> tuple[Floats, Floats]:
    """A line in at most `2 * stretches + 2` points that keep its ends and its extremes."""
    if len(x) <= 2 * stretches + 2:
        return x, y
    kept = _find_extremes(y, stretches)
    return x[kept], y[kept]


def _thin(points: _Points) -> _Points:
    """About half of `MAX_POINTS` points if there are more than `MAX_POINTS`: the extremes of equal ranges of steps.

    Ranges of steps and not of points, because the beginning of a growing curve was thinned before and its end was not.
    """
    if len(points) <= MAX_POINTS:
        return points
    steps, values = points[:, 0], points[:, 1]
    count = MAX_POINTS // 4
    share = (steps - steps[0]) / ((steps[-1] - steps[0]) or 1.0)
    group = np.minimum((share * count).astype(int), count - 1)
    ends = np.flatnonzero(np.diff(group, append=count))
    starts = np.append(0, ends[:-1] + 1)
    lowest = np.lexsort((np.where(np.isnan(values), np.inf, values), group))[starts]
    highest = np.lexsort((np.where(np.isnan(values), -np.inf, values), group))[ends]
    thinned: _Points = points[np.unique(np.concatenate([[0, len(points) - 1], lowest, highest]))]
    return thinned


def _find_extremes(values: Floats, stretches: int) -> NDArray[np.intp]:
    """Indexes of the lowest and the highest value of equal stretches, and of the first and the last of all."""
    stretch = -(-len(values) // stretches)
    count = -(-len(values) // stretch)
    padded = np.full(count * stretch, np.nan)
    padded[: len(values)] = values
    rows, starts = padded.reshape(count, stretch), np.arange(count) * stretch
    lowest = starts + np.where(np.isnan(rows), np.inf, rows).argmin(axis=1)
    highest = starts + np.where(np.isnan(rows), -np.inf, rows).argmax(axis=1)
    return np.unique(np.concatenate([[0, len(values) - 1], lowest, highest]))
