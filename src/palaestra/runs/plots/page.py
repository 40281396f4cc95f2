"""One page of HTML with curves, Pareto front and table: everything is in the file, and nothing is loaded."""

from __future__ import annotations

import html
import math
from importlib.resources import files

from palaestra.runs.analysis.groups import GroupComparison
from palaestra.runs.plots.curves import CurveSet
from palaestra.runs.plots.drawing import to_svg
from palaestra.runs.plots.figure import COLORS, draw_curves, draw_pareto, label_text
from palaestra.strict_json import dump_json


def build_page(comparison: GroupComparison, curves: CurveSet, title: str) -> str:
    """The page. Hovering shows the values of all groups at a step; the legend of the table hides groups."""
    figure = draw_curves(curves, title)
    data = {
        "steps": curves.steps,
        "x": [*figure.x_range, *figure.x_pixels],
        "y": figure.y_pixels,
        "groups": [
            {
                "label": curve.label,
                "color": COLORS[index % len(COLORS)],
                "mean": [_round_number(value) for value in curve.mean],
                "low": [_round_number(value) for value in curve.low],
                "high": [_round_number(value) for value in curve.high],
            }
            for index, curve in enumerate(curves.curves)
        ],
    }
    has_times = any(group.time_s is not None for group in comparison.groups)
    parts = {
        "title": html.escape(title),
        "curves": to_svg(figure),
        "pareto": to_svg(draw_pareto(comparison, "Result against time")) if has_times else "",
        "summary": html.escape(f"{comparison.metric} at step {comparison.step or 0:,} ({comparison.window})"),
        "table": _format_table(comparison),
        "notes": "".join(f"<li>{html.escape(note)}</li>" for note in comparison.notes),
        # A closing tag inside a string would end the script.
        "data": dump_json(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    page = files("palaestra.runs.plots").joinpath("page.html").read_text(encoding="utf-8")
    # In one pass: a title may contain the name of another part.
    pieces = page.split("@@")
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def _round_number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _format_table(comparison: GroupComparison) -> str:
    titles = ("", "configuration", "runs", "mean", "95 % interval", "IQM", "95 % interval", "seconds", "front")
    rows = ["<tr>" + "".join(f"<th>{title}</th>" for title in titles) + "</tr>"]
    for index, group in enumerate(comparison.groups):
        label = html.escape(group.label)
        color = COLORS[index % len(COLORS)]
        toggle = f'<button data-group="{label}" style="color:{color}" title="show or hide">&#9679; {label}</button>'
        run_ids = html.escape(", ".join(score.run_id for score in group.runs))
        cells = (
            toggle,
            html.escape(label_text("", group.parameters).strip()),
            f'<span title="{run_ids}">{group.num_values} of {len(group.runs)}</span>',
            _format_number(group.mean),
            _format_range(group.low, group.high),
            _format_number(group.iqm),
            _format_range(group.iqm_low, group.iqm_high),
            _format_number(group.time_s),
            "&#9733;" if group.on_front else "",
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return "\n".join(rows)


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def _format_range(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"[{_format_number(low)}, {_format_number(high)}]"
