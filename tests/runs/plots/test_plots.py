"""Curves with numbers that can be computed by hand, and files that hold everything they need."""

import io
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image
from tests.evaluation.test_viewer import HOSTILE, in_browser, needs_browser

from palaestra.runs.analysis.groups import GroupComparison, RunGroup, RunScore
from palaestra.runs.plots.curves import _sample, build_curves
from palaestra.runs.plots.drawing import to_png, to_svg
from palaestra.runs.plots.figure import COLORS, draw_curves, draw_pareto, format_tick, nice_ticks
from palaestra.runs.plots.page import build_page
from palaestra.runs.series import MetricPoint

NAMES = {"svg": "{http://www.w3.org/2000/svg}"}


class _Attributes(HTMLParser):
    """The names of all attributes, as a browser's parser sees them."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def handle_starttag(self, tag, attrs):
        self.seen |= {name for name, _ in attrs}


class Reader:
    """Series by run id: values at the steps 100, 200, …"""

    def __init__(self, series):
        self._series = series

    def metrics(self, run_id, names, points):
        series = self._series[run_id]
        return {name: [MetricPoint(100 * i, value, 0.0) for i, value in enumerate(series, 1)] for name in names}


def group(label, run_ids, *, phases=None, **fields):
    runs = tuple(
        RunScore(
            run_id=run_id,
            env_id="A-v0",
            phase=(phases or {}).get(run_id, "succeeded"),
            seed=0,
            value=1.0,
            time_s=1.0,
        )
        for run_id in run_ids
    )
    return RunGroup(label=label, parameters={"algorithm.lr": 0.1}, runs=runs, num_values=len(runs), **fields)


def comparison(*groups, metric="eval_return"):
    return GroupComparison(
        metric=metric, window="last evaluation", direction="maximize", step=200, groups=groups, notes=("a note",)
    )


def two_groups(label="A"):
    """Group A has three runs with a spread at step 100 and none at step 200; group B has one run."""
    reader = Reader({"a1": [1.0, 4.0], "a2": [3.0, 4.0], "a3": [2.0, 4.0], "b1": [0.0, 8.0]})
    first = group(label, ["a1", "a2", "a3"], mean=4.0, low=4.0, high=4.0, iqm=4.0, time_s=2.0, on_front=True)
    groups = comparison(first, group("B", ["b1"], mean=8.0, time_s=5.0, on_front=True))
    return groups, build_curves(reader, groups)


def at(curves, values, step):
    return values[curves.steps.index(step)]


def test_a_curve_is_the_mean_over_the_runs_with_the_interval_of_students_t():
    _, curves = two_groups()
    first, second = curves.curves
    assert curves.steps[-1] == 200
    assert (at(curves, first.mean, 100), at(curves, first.mean, 200)) == (2.0, 4.0)
    # The standard deviation is 1, and the 97.5 % quantile of Student's t with two degrees of freedom 4.303.
    assert at(curves, first.low, 100) == pytest.approx(2 - 4.303 / 3**0.5, abs=1e-3)
    assert (at(curves, first.low, 200), at(curves, first.high, 200)) == (4.0, 4.0)
    assert at(curves, second.mean, 200) == 8.0
    assert np.isnan(second.low).all()
    assert np.isnan(at(curves, first.mean, 1))  # nothing was measured before step 100


def test_a_value_is_the_mean_of_the_last_points_and_nan_stays_nan():
    steps, values = np.array([10.0, 20.0, 30.0, 40.0]), np.array([1.0, 3.0, np.nan, 5.0])
    sampled = _sample(steps, values, (5, 10, 25, 35, 40), 2)
    assert sampled[1:3].tolist() == [1.0, 2.0]
    assert np.isnan(sampled[[0, 3, 4]]).all()


def test_a_mean_ends_with_the_shortest_run_that_did_not_fail():
    reader = Reader({"long": [1.0, 2.0, 3.0], "short": [3.0, 4.0], "broken": [5.0]})
    groups = comparison(group("A", ["long", "short", "broken"], phases={"broken": "failed"}))
    curves = build_curves(reader, groups)
    (curve,) = curves.curves
    assert (at(curves, curve.mean, 200), len(curve.lines)) == (3.0, 3)
    assert np.isnan(at(curves, curve.mean, 300))
    assert at(curves, curve.lines[0].values, 300) == 3.0


def test_ticks_are_round_numbers_within_the_range():
    assert nice_ticks(0, 50_000) == [0, 10_000, 20_000, 30_000, 40_000, 50_000]
    assert nice_ticks(-0.03, 0.11) == [0.0, 0.05, 0.1]
    assert [format_tick(value) for value in (0, 500, 9000, 10_000, 1.5e6, -0.02)] == (
        ["0", "500", "9000", "10k", "1.5M", "-0.02"]
    )


def test_svg_is_xml_with_a_line_per_run_a_mean_and_a_band_per_group():
    _, curves = two_groups()
    root = ET.fromstring(to_svg(draw_curves(curves, f"{HOSTILE}\x00\x1b")))
    groups = [element for element in root.iter() if element.get("data-group")]
    drawn = {one.get("data-group"): [child.tag.removeprefix(NAMES["svg"]) for child in one] for one in groups}
    assert drawn == {"A": ["polygon", *["polyline"] * 4], "B": ["polyline", "polyline"]}
    assert not list(root.iter(f"{NAMES['svg']}script"))
    texts = [text.text for text in root.iter(f"{NAMES['svg']}text")]
    assert f"{HOSTILE}��" in texts
    assert "A  lr=0.1" in texts


def test_two_runs_have_no_band_and_the_legend_says_so():
    groups = comparison(group("A", ["a", "b"]))
    curves = build_curves(Reader({"a": [1.0, 4.0], "b": [3.0, 4.0]}), groups)
    (curve,) = curves.curves
    assert at(curves, curve.mean, 100) == 2.0
    assert np.isnan(curve.low).all()
    svg = to_svg(draw_curves(curves))
    assert "<polygon" not in svg
    assert "A  lr=0.1  (mean of 2 runs; a band needs 3)" in svg


def test_steps_are_of_an_environment_only_if_there_is_one():
    reader = Reader({"a1": [1.0, 2.0]})
    groups = comparison(group("A", ["a1"]))
    assert ">environment steps<" in to_svg(draw_curves(build_curves(reader, groups)))
    scripts = tuple(replace(score, env_id="") for score in groups.groups[0].runs)
    groups = comparison(replace(groups.groups[0], runs=scripts))
    assert ">steps<" in to_svg(draw_curves(build_curves(reader, groups)))


def test_png_has_the_size_of_the_figure_and_its_colours():
    _, curves = two_groups()
    figure = draw_curves(curves, "Title")
    image = Image.open(io.BytesIO(to_png(figure)))
    assert image.size == (2 * figure.width, 2 * figure.height)
    colors = {color for _, color in image.getcolors(1 << 24)}
    for color in COLORS[:2]:
        assert tuple(bytes.fromhex(color[1:])) in colors


def test_the_pareto_figure_joins_the_front():
    groups, _ = two_groups()
    figure = draw_pareto(groups)
    (front,) = [shape for shape in figure.shapes if getattr(shape, "color", "") == "#999999"]
    assert len(front.points) == 2
    assert front.points[0][0] < front.points[1][0]  # more time
    assert front.points[0][1] > front.points[1][1]  # a better result is higher
    assert set(figure.groups) == {"A", "B"}


def test_the_page_loads_nothing_and_makes_no_markup_of_names():
    groups, curves = two_groups(HOSTILE)
    page = build_page(groups, curves, f"{HOSTILE}@@data@@")
    assert "default-src 'none'" in page
    parser = _Attributes()
    parser.feed(page)
    assert not parser.seen & {"src", "href", "onerror", "action"}
    assert not re.search(r"https?:|url\(|@import", page.replace("http://www.w3.org/2000/svg", ""))
    assert "\\u003c/script>" in page
    assert page.count("<script") == 2


@needs_browser
def test_hovering_shows_the_values_of_all_groups_and_the_legend_hides_one(tmp_path):
    groups, curves = two_groups()
    path = tmp_path / "page.html"
    path.write_text(build_page(groups, curves, "Two groups"))
    hover = """(() => { const box = document.querySelector('svg').getBoundingClientRect();
      document.querySelector('svg').dispatchEvent(new MouseEvent('mousemove',
        {clientX: box.left + box.width * (900 - 24.5) / 900, clientY: box.top + 100, bubbles: true}));
      return document.getElementById('tip').innerText.split('\\n'); })()"""
    hide = "document.querySelector('button[data-group=\"A\"]').click()"
    drawn = "[...document.querySelectorAll('#chart g.group')].map(g => getComputedStyle(g).display)"
    assert in_browser(path, hover, hide, hover, drawn) == [
        ["step 200", "A  4 [4, 4]", "B  8"],
        None,
        ["step 200", "B  8"],
        ["none", "inline"],
    ]
