"""Curves of runs: points from the service, new points as they arrive, and the lines that a chart draws from them.

The service sends any range of a curve in a bounded number of points that keep its extremes, so a curve of ten million
points costs as much as one of two thousand. Points that arrive live are appended and, when there are too many, thinned
the same way.
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
XAxis: TypeAlias = Literal["step", "time", "wall time", "episode"]
MAX_POINTS = 4096
"""Points of a curve that are kept; the service sends at most half of them."""
REQUEST_POINTS = 2000
_GRID = 400
"""Places at which the curves of a group are compared."""


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
        self._points: NDArray[np.float64] = np.empty((0, 3))
        self._detail: NDArray[np.float64] = np.empty((0, 3))
        self._new: list[MetricPoint] = []

    def __len__(self) -> int:
        return len(self._points) + len(self._new)

    def set_points(self, points: Sequence[MetricPoint]) -> None:
        """The whole curve, from the service. Points that arrived meanwhile and are newer stay."""
        last = points[-1].step if points else -math.inf
        newer = [point for point in self._new if point.step > last]
        self._points, self._new = _as_array(points), newer

    def set_detail(self, points: Sequence[MetricPoint]) -> None:
        """A part of the curve in more detail, for a chart that shows only this part."""
        self._detail = _as_array(points)

    def append(self, points: Iterable[MetricPoint]) -> None:
        """New points, in their order."""
        self._new.extend(points)

    @property
    def last(self) -> MetricPoint | None:
        """The newest point."""
        if self._new:
            return self._new[-1]
        if not len(self._points):
            return None
        step, value, time = self._points[-1]
        return MetricPoint(int(step), float(value), float(time))

    def arrays(self) -> tuple[Floats, Floats, Floats]:
        """Steps, values and times: the whole curve, with the detail where there is some."""
        if self._new:
            self._points = _thin(np.concatenate([self._points, _as_array(self._new)]))
            self._new = []
        points = self._points
        if len(self._detail):
            first, last = self._detail[0, 0], self._detail[-1, 0]
            before, after = points[points[:, 0] < first], points[points[:, 0] > last]
            points = np.concatenate([before, self._detail, after])
        return points[:, 0], points[:, 1], points[:, 2]


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
        """A whole curve has arrived."""
        self._curve(run_id, metric).set_points(points)
        self.touch()

    def set_detail(self, run_id: str, metric: str, points: Sequence[MetricPoint]) -> None:
        """A part of a curve has arrived in more detail."""
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

    def expect(self, run_id: str, metric: str) -> None:
        """Note that a curve was requested, so that new points are kept from now on."""
        self._curve(run_id, metric)

    def last_value(self, run_id: str, metric: str) -> float | None:
        """The newest value of a metric."""
        curve = self._curves.get((run_id, metric))
        last = None if curve is None else curve.last
        return None if last is None else last.value

    def lines(self, metric: str) -> list[ChartLine]:
        """The lines of a metric."""
        lines = []
        for source in self.sources:
            curve = self._curves.get((source.run_id, metric))
            if curve is None or not len(curve):
                continue
            step, value, time = curve.arrays()
            x = self._x(source, step, time)
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

    def _x(self, source: CurveSource, step: Floats, time: Floats) -> Floats:
        if self.options.x_axis == "wall time":
            return time
        if self.options.x_axis == "time":
            return time - (source.started or (time[0] if len(time) else 0.0))
        if self.options.x_axis == "episode":
            episodes = self._curves.get((source.run_id, "episodes"))
            if episodes is not None and len(episodes):
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
    """The mean of several lines and the band of one standard deviation, where all of them have values."""
    first = max(float(x[0]) for x, _ in lines)
    last = min(float(x[-1]) for x, _ in lines)
    grid = np.linspace(first, max(first, last), _GRID)
    values = np.stack([np.interp(grid, x, smooth(y, smoothing)) for x, y in lines])
    mean, spread = values.mean(axis=0), values.std(axis=0)
    return ChartLine(key, label, grid, mean, mean - spread, mean + spread)


def smooth(values: Floats, weight: float) -> Floats:
    """Exponential moving average without the bias towards the first value; NaN is passed over."""
    if weight <= 0 or not len(values):
        return values
    result = np.empty(len(values))
    average, mass = 0.0, 0.0
    for index, value in enumerate(values.tolist()):
        if math.isfinite(value):
            average = weight * average + (1 - weight) * value
            mass = weight * mass + (1 - weight)
        result[index] = average / mass if mass else value
    return result


def _as_array(points: Sequence[MetricPoint]) -> NDArray[np.float64]:
    return np.array(points, np.float64).reshape(-1, 3)


def _thin(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """At most `MAX_POINTS` points: of equal stretches, the lowest and the highest."""
    if len(points) <= MAX_POINTS:
        return points
    stretch = -(-len(points) // (MAX_POINTS // 4))
    keep = {0, len(points) - 1}
    values = np.nan_to_num(points[:, 1], nan=0.0)
    for start in range(0, len(points), stretch):
        part = values[start : start + stretch]
        keep |= {start + int(part.argmin()), start + int(part.argmax())}
    return points[sorted(keep)]
