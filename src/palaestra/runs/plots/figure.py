"""A figure as shapes in pixels: axes, lines, bands and labels. `drawing` turns them into SVG or PNG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from palaestra.runs.analysis.groups import GroupComparison, RunGroup
from palaestra.runs.plots.curves import MIN_BAND_RUNS, CurveSet, GroupCurve

WIDTH, HEIGHT = 900, 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 24, 44, 58
_LEGEND_LINE = 18
_MAX_LEGEND = 24
_MAX_LABEL = 90
COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#6a3d9a",
    "#8c564b",
    "#7f7f7f",
    "#bcbd22",
)
"""Distinguishable with colour blindness (Okabe and Ito), then further ones."""
_INK, _GRID = "#333333", "#dddddd"
Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class Polyline:
    """A polyline."""

    points: tuple[Point, ...]
    color: str
    width: float = 1.0
    opacity: float = 1.0


@dataclass(frozen=True)
class Area:
    """A filled polygon."""

    points: tuple[Point, ...]
    color: str
    opacity: float = 1.0


@dataclass(frozen=True)
class Text:
    """Text whose baseline is at `at`."""

    at: Point
    text: str
    anchor: str = "start"
    """`start`, `middle` or `end`."""
    size: int = 13
    color: str = _INK
    vertical: bool = False


Shape: TypeAlias = Polyline | Area | Text


@dataclass(frozen=True)
class Figure:
    """Shapes in pixels. Those of a group can be hidden together."""

    width: int
    height: int
    shapes: tuple[Shape, ...]
    groups: Mapping[str, tuple[Shape, ...]] = field(default_factory=dict)
    """Shapes by label of a group, drawn above the others."""
    x_range: Point = (0.0, 1.0)
    """Values at the left and right end of the axis."""
    x_pixels: Point = (0.0, 1.0)
    y_pixels: Point = (0.0, 1.0)


@dataclass(frozen=True)
class _Axes:
    """Maps values to pixels."""

    x_range: Point
    y_range: Point
    left: float
    right: float
    top: float
    bottom: float

    def point(self, x: float, y: float) -> Point:
        x_low, x_high = self.x_range
        y_low, y_high = self.y_range
        across = (x - x_low) / (x_high - x_low) * (self.right - self.left)
        up = (y - y_low) / (y_high - y_low) * (self.bottom - self.top)
        return round(self.left + across, 2), round(self.bottom - up, 2)


def draw_curves(curves: CurveSet, title: str = "") -> Figure:
    """Learning curves: thin lines for runs, thick lines for means, bands for 95 % intervals."""
    everything = [
        value
        for curve in curves.curves
        for values in (curve.mean, curve.low, curve.high, *(line.values for line in curve.lines))
        for value in values
        if math.isfinite(value)
    ]
    labels = [_legend_text(curve) for curve in curves.curves]
    axes, height = _place_axes((0.0, float(curves.steps[-1])), _pad(everything), len(labels))
    shapes = [*_draw_frame(axes, title, curves.x_label, curves.metric), *_draw_legend(labels, axes)]
    groups = {
        curve.label: tuple(_draw_curve(curve, curves.steps, axes, COLORS[index % len(COLORS)]))
        for index, curve in enumerate(curves.curves)
    }
    return Figure(WIDTH, height, tuple(shapes), groups, axes.x_range, (axes.left, axes.right), (axes.top, axes.bottom))


def draw_pareto(comparison: GroupComparison, title: str = "") -> Figure:
    """Result against time: a point with its interval for each group, and a line through the Pareto front."""
    groups = [group for group in comparison.groups if group.mean is not None and group.time_s is not None]
    ends = [value for group in groups for value in (group.mean, group.low, group.high) if value is not None]
    times = [group.time_s for group in groups if group.time_s is not None]
    labels = [label_text(group.label, group.parameters) for group in comparison.groups]
    axes, height = _place_axes((0.0, 1.08 * max(times, default=1.0) or 1.0), _pad(ends), len(labels))
    y_label = f"{comparison.metric} at step {comparison.step or 0:,}"
    shapes = [*_draw_frame(axes, title, "seconds", y_label), *_draw_legend(labels, axes)]
    front = sorted((group.time_s or 0.0, group.mean or 0.0) for group in groups if group.on_front)
    if len(front) > 1:
        shapes.append(Polyline(tuple(axes.point(*point) for point in front), "#999999", 1.5, 0.8))
    order = {group.label: index for index, group in enumerate(comparison.groups)}
    marks = {
        group.label: tuple(_draw_group_mark(group, axes, COLORS[order[group.label] % len(COLORS)])) for group in groups
    }
    return Figure(WIDTH, height, tuple(shapes), marks, axes.x_range, (axes.left, axes.right), (axes.top, axes.bottom))


def label_text(label: str, parameters: Mapping[str, object]) -> str:
    """`A  learning_rate=0.001`; keys without their sections where that is not ambiguous."""
    ends = [key.rpartition(".")[2] for key in parameters]
    parts = []
    for (key, value), end in zip(parameters.items(), ends, strict=True):
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        parts.append(f"{end if ends.count(end) == 1 else key}={shown}")
    text = f"{label}  {' '.join(parts)}".rstrip()
    return text if len(text) <= _MAX_LABEL else text[: _MAX_LABEL - 1] + "…"


def _legend_text(curve: GroupCurve) -> str:
    text = label_text(curve.label, curve.parameters)
    if curve.has_band or len(curve.lines) == 1:
        return text
    return f"{text}  (mean of {len(curve.lines)} runs; a band needs {MIN_BAND_RUNS})"


def _place_axes(x_range: Point, y_range: Point, num_labels: int) -> tuple[_Axes, int]:
    """The axes, and the height of the figure with its legend below them."""
    bottom = HEIGHT - _BOTTOM
    lines = min(num_labels, _MAX_LEGEND) + (num_labels > _MAX_LEGEND)
    return _Axes(x_range, y_range, _LEFT, WIDTH - _RIGHT, _TOP, bottom), HEIGHT + lines * _LEGEND_LINE + 8


def _draw_frame(axes: _Axes, title: str, x_label: str, y_label: str) -> Iterator[Shape]:
    middle = (axes.left + axes.right) / 2
    yield Text((middle, axes.top - 16), title, "middle", 16)
    for value in nice_ticks(*axes.y_range):
        _, y = axes.point(axes.x_range[0], value)
        yield Polyline(((axes.left, y), (axes.right, y)), _GRID)
        yield Text((axes.left - 8, y + 4), format_tick(value), "end", 12)
    for value in nice_ticks(*axes.x_range):
        x, _ = axes.point(value, axes.y_range[0])
        yield Polyline(((x, axes.bottom), (x, axes.bottom + 5)), _INK)
        yield Text((x, axes.bottom + 20), format_tick(value), "middle", 12)
    yield Polyline(((axes.left, axes.top), (axes.left, axes.bottom), (axes.right, axes.bottom)), _INK)
    yield Text((middle, axes.bottom + 42), x_label, "middle")
    yield Text((20, (axes.top + axes.bottom) / 2), y_label, "middle", vertical=True)


def _draw_legend(labels: Sequence[str], axes: _Axes) -> Iterator[Shape]:
    for index, label in enumerate(labels[:_MAX_LEGEND]):
        y = HEIGHT + index * _LEGEND_LINE + 4
        color = COLORS[index % len(COLORS)]
        yield Polyline(((axes.left, y - 4), (axes.left + 24, y - 4)), color, 3)
        yield Text((axes.left + 32, y), label, size=12)
    if len(labels) > _MAX_LEGEND:
        y = HEIGHT + _MAX_LEGEND * _LEGEND_LINE + 4
        yield Text((axes.left + 32, y), f"and {len(labels) - _MAX_LEGEND} more", size=12)


def _draw_curve(curve: GroupCurve, steps: Sequence[int], axes: _Axes, color: str) -> Iterator[Shape]:
    for start, stop in _finite_stretches(curve.low):
        top = [axes.point(steps[i], curve.high[i]) for i in range(start, stop)]
        bottom = [axes.point(steps[i], curve.low[i]) for i in reversed(range(start, stop))]
        if stop - start > 1:
            yield Area((*top, *bottom), color, 0.18)
    for line in curve.lines:
        opacity = 0.35 if curve.has_band else 0.7 if len(curve.lines) > 1 else 1.0
        yield from _draw_line(line.values, steps, axes, color, 0.8, opacity)
    yield from _draw_line(curve.mean, steps, axes, color, 2.4, 1.0)


def _draw_line(
    values: Sequence[float], steps: Sequence[int], axes: _Axes, color: str, width: float, opacity: float
) -> Iterator[Shape]:
    for start, stop in _finite_stretches(values):
        points = tuple(axes.point(steps[i], values[i]) for i in range(start, stop))
        if len(points) > 1:
            yield Polyline(points, color, width, opacity)


def _draw_group_mark(group: RunGroup, axes: _Axes, color: str) -> Iterator[Shape]:
    x, y = axes.point(group.time_s or 0.0, group.mean or 0.0)
    if group.low is not None and group.high is not None:
        ends = (axes.point(group.time_s or 0.0, group.low), axes.point(group.time_s or 0.0, group.high))
        yield Polyline(ends, color, 1.5, 0.7)
    corners = [(x + 5 * math.cos(angle * math.pi / 8), y + 5 * math.sin(angle * math.pi / 8)) for angle in range(16)]
    yield Area(tuple((round(a, 2), round(b, 2)) for a, b in corners), color)
    yield Text((x + 8, y - 6), group.label, size=12, color=color)


def _finite_stretches(values: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Start and stop of each stretch without NaN or infinity."""
    start: int | None = None
    for index, value in enumerate((*values, math.nan)):
        if math.isfinite(value):
            start = index if start is None else start
        elif start is not None:
            yield start, index
            start = None


def _pad(values: Sequence[float]) -> Point:
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def nice_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers within a range: 1, 2 or 5 times a power of ten apart."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    ticks = [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]
    return [round(tick, 12) for tick in ticks]


def format_tick(value: float) -> str:
    """`250`, `1.5k`, `2M`, `-0.05`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (10 if unit == "k" else 1):
            return f"{value / size:g}{unit}"
    return f"{value:g}"
