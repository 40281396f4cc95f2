import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.runs.series import MetricPoint
from palaestra.studio.model.chart import (
    MAX_POINTS,
    REQUEST_POINTS,
    Charts,
    Curve,
    CurveSource,
    combine_lines,
    short_number,
    smooth,
    thin_line,
)


def _points(*steps, value=0.0):
    """One point a second, with the step as its time."""
    return [MetricPoint(step, value, float(step)) for step in steps]


def _steps(curve):
    return curve.arrays()[0].tolist()


# ---------------------------------------------------------------------- one curve


def test_a_curve_is_empty_until_points_arrive():
    curve = Curve()
    assert (len(curve), _steps(curve)) == (0, [])
    curve.append(_points(1, 2))

    assert (len(curve), _steps(curve), len(curve)) == (2, [1, 2], 2)


def test_a_live_point_that_was_drawn_before_the_curve_arrived_is_not_lost():
    curve = Curve()
    curve.append(_points(9, 10))
    assert _steps(curve) == [9, 10]

    curve.set_points(_points(1, 5, 9))

    assert _steps(curve) == [1, 5, 9, 10]


def test_of_two_points_at_one_step_the_later_one_is_newer():
    curve = Curve()
    curve.append([MetricPoint(5, 1.0, 10.0), MetricPoint(5, 2.0, 11.0)])
    curve.set_points([MetricPoint(5, 1.0, 10.0)])

    assert [row.tolist() for row in curve.arrays()] == [[5, 5], [1, 2], [10, 11]]


def test_the_curve_of_a_resumed_run_replaces_what_the_run_made_before_behind_its_checkpoint():
    curve = Curve()
    curve.set_points(_points(100, 200, 300, 400))
    curve.append([MetricPoint(220, 7.0, 1000.0), MetricPoint(230, 8.0, 1001.0)])

    curve.set_points([*_points(100, 200), MetricPoint(220, 7.0, 1000.0)])

    assert _steps(curve) == [100, 200, 220, 230]


def test_an_empty_answer_takes_nothing_away():
    curve = Curve()
    curve.append(_points(1))
    curve.set_points([])

    assert _steps(curve) == [1]


_EVENTS = st.lists(
    st.tuples(st.sampled_from(["append", "answer", "draw"]), st.integers(1, 5), st.integers(0, 3)), max_size=20
)


@given(events=_EVENTS, values=st.lists(st.floats(), min_size=100, max_size=100))
def test_no_live_point_is_lost_or_doubled_in_any_order_of_answers_draws_and_repetitions(events, values):
    curve = Curve()
    made = [MetricPoint(step, value, 100.0 + step) for step, value in enumerate(values)]
    sent, last_request = 0, 0
    for kind, count, back in events:
        if kind == "append":
            start = max(0, sent - back)  # a stream that begins again repeats some points
            sent = min(len(made), max(sent, start + count))
            curve.append(made[start:sent])
        elif kind == "answer":  # holds at least what an earlier answer held, and lags behind the live points
            last_request = max(last_request, sent - back)
            curve.set_points(made[:last_request])
        else:
            curve.arrays()

    expected = np.array(made[:sent]).reshape(-1, 3)
    assert np.array_equal(np.stack(curve.arrays(), axis=1), expected, equal_nan=True)


def test_points_of_a_resumed_run_replace_those_behind_them():
    curve = Curve()
    curve.set_points(_points(100, 200, 300, 400))
    curve.append([MetricPoint(250, 7.0, 1000.0), MetricPoint(350, 8.0, 1001.0)])

    assert _steps(curve) == [100, 200, 250, 350]
    assert curve.arrays()[1].tolist() == [0, 0, 7, 8]


def test_detail_replaces_its_part_of_the_curve_until_the_run_goes_back():
    curve = Curve()
    curve.set_points(_points(0, 10, 20, 30))
    curve.set_detail(_points(8, 9, 10, 11, value=1.0))
    assert _steps(curve) == [0, 8, 9, 10, 11, 20, 30]
    curve.append(_points(40))
    assert _steps(curve) == [0, 8, 9, 10, 11, 20, 30, 40]

    curve.append([MetricPoint(5, 0.0, 100.0)])

    assert _steps(curve) == [0, 5]


@given(
    count=st.integers(MAX_POINTS + 1, 5 * MAX_POINTS),
    special=st.dictionaries(st.integers(0, 5 * MAX_POINTS), st.floats(allow_infinity=False), max_size=30),
)
def test_thinning_keeps_the_first_the_last_the_lowest_the_highest_and_the_order(count, special):
    values = np.sin(np.arange(count))
    for position, value in special.items():
        values[position % count] = value
    curve = Curve()
    curve.append([MetricPoint(step, value, float(step)) for step, value in enumerate(values.tolist())])
    step, kept, time = curve.arrays()

    assert len(step) <= MAX_POINTS
    assert (step[0], step[-1]) == (0, len(values) - 1)
    assert (np.diff(step) > 0).all()
    assert np.array_equal(values[step.astype(int)], kept, equal_nan=True)
    assert np.array_equal(step, time)
    assert (np.nanmin(kept), np.nanmax(kept)) == (np.nanmin(values), np.nanmax(values))


def test_a_curve_that_grows_live_is_drawn_as_finely_at_its_beginning_as_at_its_end():
    curve = Curve()
    for start in range(0, 100_000, 500):
        curve.append([MetricPoint(step, math.sin(step), float(step)) for step in range(start, start + 500)])
        curve.arrays()
    steps = curve.arrays()[0]

    counts = np.histogram(steps, bins=4, range=(0, 80_000))[0]
    assert counts.min() > 0.8 * counts.max()


def test_a_curve_that_grows_live_stays_bounded_and_keeps_a_spike_of_its_beginning():
    curve = Curve()
    for start in range(0, 100_000, 500):
        curve.append(
            MetricPoint(step, 1e6 if step == 1234 else math.sin(step), float(step))
            for step in range(start, start + 500)
        )
        assert len(curve.arrays()[0]) <= MAX_POINTS

    step, value, _ = curve.arrays()
    assert (step[0], step[-1], step[value.argmax()]) == (0, 99_999, 1234)
    assert len(step) > MAX_POINTS / 4


def test_a_value_that_is_not_a_number_hides_neither_the_lowest_nor_the_highest_beside_it():
    values = np.full(2 * MAX_POINTS, 5.0)
    values[1000:1003] = 2.0, math.nan, 9.0
    values[3000:3003] = -2.0, math.nan, -9.0
    curve = Curve()
    curve.append([MetricPoint(step, value, 0.0) for step, value in enumerate(values.tolist())])
    kept = curve.arrays()[1].tolist()

    assert {2.0, 9.0, -9.0, 5.0} <= set(kept)


def test_a_stretch_without_a_number_stays_a_gap():
    curve = Curve()
    count = 2 * MAX_POINTS
    curve.append(MetricPoint(step, math.nan if step >= MAX_POINTS else 1.0, 0.0) for step in range(count))
    step, value, _ = curve.arrays()

    assert np.isnan(value[step >= MAX_POINTS]).all()
    assert (value[step < MAX_POINTS] == 1.0).all()


# ---------------------------------------------------------------------- smoothing


def _smooth_one_by_one(values, weight):
    """The definition, value by value."""
    result, average, mass = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            average, mass = weight * average + (1 - weight) * value, weight * mass + (1 - weight)
        result.append(average / mass if mass else value)
    return result


_WEIGHTS = st.floats(0.001, 0.999)


@given(value=st.floats(-1e9, 1e9), count=st.integers(1, 3000), weight=_WEIGHTS)
def test_smoothing_a_constant_gives_that_constant(value, count, weight):
    assert np.allclose(smooth(np.full(count, value), weight), value, rtol=1e-9, atol=1e-300)


@given(
    values=st.lists(st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf), max_size=50),
    repetitions=st.integers(1, 40),
    weight=_WEIGHTS,
)
def test_smoothing_agrees_with_its_definition(values, repetitions, weight):
    values = values * repetitions
    expected = np.array(_smooth_one_by_one(values, weight))

    assert np.allclose(smooth(np.array(values), weight), expected, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_smoothing_by_hand():
    assert smooth(np.array([1.0, 4.0, math.nan]), 0.5).tolist() == [1.0, 3.0, 3.0]  # (0.25 * 1 + 0.5 * 4) / 0.75
    assert smooth(np.array([math.nan, 2.0]), 0.5).tolist()[1] == 2.0


@pytest.mark.parametrize("weight", [-1.0, 0.0, 1.0, 2.0])
def test_a_weight_outside_its_range_smooths_nothing(weight):
    assert smooth(np.array([1.0, 4.0]), weight).tolist() == [1.0, 4.0]


# ---------------------------------------------------------------------- groups


def _line(*pairs):
    x, y = zip(*pairs, strict=True)
    return np.array(x, float), np.array(y, float)


def test_two_lines_give_their_mean_and_a_band_of_one_standard_deviation():
    line = combine_lines("k", "two", [_line((0, 0), (100, 100)), _line((0, 20), (100, 140))])

    assert (line.key, line.label, line.x[0], line.x[-1], len(line.x)) == ("k", "two", 0, 100, 400)
    assert np.allclose(line.y, 10 + 1.1 * line.x)  # (x + 20 + 1.2 x) / 2
    half = (20 + 0.2 * line.x) / 2  # with two values, the deviation is half of their distance
    assert np.allclose(line.low, line.y - half)
    assert np.allclose(line.high, line.y + half)


def test_a_run_that_has_just_begun_does_not_hide_the_others():
    line = combine_lines("k", "two", [_line((0, 10), (100, 10)), _line((0, 20), (10, 20))])
    is_both = line.x <= 10

    assert (line.x[0], line.x[-1]) == (0, 100)
    assert np.allclose(line.y[is_both], 15)
    assert np.allclose(line.high[is_both], 20)
    assert np.allclose(line.y[~is_both], 10)
    assert np.allclose(line.high[~is_both], 10)


def test_values_that_are_not_finite_are_left_out_of_the_mean():
    line = combine_lines("k", "two", [_line((0, 1), (5, math.nan), (10, 1)), _line((0, 3), (5, math.inf), (10, 3))])
    assert np.allclose(line.y, 2)
    nothing = _line((0, math.nan), (10, math.nan))
    assert np.allclose(combine_lines("k", "two", [nothing, _line((0, 3), (10, 3))]).y, 3)

    assert len(combine_lines("k", "none", [nothing, nothing]).x) == 0


def test_lines_that_do_not_overlap_leave_no_places_between_them():
    line = combine_lines("k", "two", [_line((0, 1), (10, 1)), _line((90, 2), (100, 2))])

    assert not ((line.x > 10) & (line.x < 90)).any()
    assert set(line.y.tolist()) == {1.0, 2.0}
    assert np.isfinite(line.low).all()


def test_lines_of_one_point_are_one_place():
    line = combine_lines("k", "two", [_line((5, 1)), _line((5, 2))])

    assert (line.x.tolist(), line.y.tolist(), line.low.tolist(), line.high.tolist()) == ([5], [1.5], [1], [2])


def test_a_group_is_smoothed_before_its_mean():
    line = combine_lines("k", "two", [_line((0, 1), (1, 4)), _line((0, 1), (1, 4))], 0.5)

    assert (line.y[0], line.y[-1]) == (1.0, 3.0)


# ---------------------------------------------------------------------- all charts


A, B = CurveSource("a", "Run A", "group", started=100.0), CurveSource("b", "Run B", "group")


@pytest.fixture
def charts():
    charts = Charts()
    charts.set_sources([A, B])
    charts.set_curve("a", "loss", [MetricPoint(0, 4.0, 110.0), MetricPoint(10, 2.0, 120.0)])
    charts.set_curve("b", "loss", [MetricPoint(0, 8.0, 500.0), MetricPoint(10, 6.0, 530.0)])
    return charts


def test_each_run_is_a_line_by_step_or_by_the_time_since_its_start(charts):
    first = charts.lines("loss")[0]
    assert (first.key, first.label, first.x.tolist(), first.y.tolist()) == ("a", "Run A", [0, 10], [4, 2])
    assert (first.raw, first.low) == (None, None)
    charts.set_options(x_axis="time")

    assert [line.x.tolist() for line in charts.lines("loss")] == [[10, 20], [0, 30]]


def test_by_episode_the_steps_become_episodes_and_runs_without_them_have_no_line(charts):
    charts.set_options(x_axis="episode")
    assert charts.lines("loss") == []
    charts.set_curve("a", "episodes", [MetricPoint(0, 0.0, 0.0), MetricPoint(20, 4.0, 1.0)])
    charts.expect("b", "episodes")

    (line,) = charts.lines("loss")

    assert (line.key, line.x.tolist()) == ("a", [0, 2])


def test_smoothing_keeps_the_line_as_it_was_beside_the_smooth_one(charts):
    charts.set_options(smoothing=0.5)

    line = charts.lines("loss")[0]

    assert (line.raw.tolist(), line.y[0]) == ([4, 2], 4.0)
    assert math.isclose(line.y[1], (0.25 * 4 + 0.5 * 2) / 0.75)


def test_runs_of_a_group_are_one_line_and_a_run_alone_stays_a_line(charts):
    charts.set_options(grouped=True)
    (line,) = charts.lines("loss")
    assert (line.key, line.label, line.y[0], line.low[0]) == ("group", "Run A and 1 more", 6.0, 4.0)
    charts.set_sources([A, CurveSource("c", "Run C", "other")])

    (alone,) = charts.lines("loss")

    assert (alone.key, alone.label, alone.y.tolist(), alone.low) == ("group", "Run A", [4, 2], None)


def test_only_curves_that_a_chart_has_asked_for_are_kept(charts):
    charts.append("a", {"loss": _points(20), "other": _points(20)})
    assert charts.lines("loss")[0].x.tolist() == [0, 10, 20]
    assert not charts.has_curve("a", "other")
    charts.expect("a", "other")
    assert charts.lines("other") == []
    before = charts.revision
    charts.append("zzz", {"loss": _points(20)})
    assert charts.revision == before

    charts.append("a", {"other": _points(30)})

    assert charts.lines("other")[0].x.tolist() == [30]


def test_the_curves_of_a_run_that_is_no_longer_chosen_are_forgotten_also_when_they_arrive_late(charts):
    charts.set_sources([B])
    charts.set_curve("a", "loss", _points(1))
    charts.set_detail("a", "loss", _points(1))

    assert not charts.has_curve("a", "loss")
    assert [line.key for line in charts.lines("loss")] == ["b"]


def test_detail_of_a_curve_is_drawn(charts):
    charts.set_detail("a", "loss", _points(3, 4))

    assert charts.lines("loss")[0].x.tolist() == [0, 3, 4, 10]


class LongSeries:
    """Ten million points, as the service keeps them: a range is sent whole if it fits, else its extremes."""

    def __init__(self):
        self.values = np.random.default_rng(7).normal(size=10_000_000)
        self.values[6_543_210] = 1e6

    def read(self, first, last, count=REQUEST_POINTS):
        steps = np.arange(max(0, first), min(last, len(self.values) - 1) + 1)
        if len(steps) > count:
            bins = np.array_split(steps, count // 4)
            ends = [(part[0], part[-1]) for part in bins]
            lows = [part[0] + self.values[part[0] : part[-1] + 1].argmin() for part in bins]
            highs = [part[0] + self.values[part[0] : part[-1] + 1].argmax() for part in bins]
            steps = np.unique(np.concatenate([np.ravel(ends), lows, highs]))
        return [MetricPoint(int(step), float(self.values[step]), float(step)) for step in steps]


def test_a_part_of_ten_million_points_is_drawn_exactly_after_zooming_in_and_spikes_are_never_lost(charts):
    series = LongSeries()
    charts.set_sources([A])
    charts.set_curve("a", "loss", series.read(0, 10_000_000))
    (line,) = charts.lines("loss")
    assert len(line.x) <= REQUEST_POINTS
    assert line.y.max() == 1e6

    for first, last in ((6_543_000, 6_544_500), (9_999_000, 10_000_500), (-200, 800)):
        charts.set_detail("a", "loss", series.read(first, last))
        (line,) = charts.lines("loss")
        inside = (line.x >= first) & (line.x <= last)
        expected = np.arange(max(0, first), min(last, 9_999_999) + 1)
        np.testing.assert_array_equal(line.x[inside], expected)
        np.testing.assert_array_equal(line.y[inside], series.values[expected])
        assert line.y.max() == 1e6
        assert (np.diff(line.x) > 0).all()
        assert len(line.x) <= 2 * REQUEST_POINTS

    charts.append("a", {"loss": [MetricPoint(10_000_000, 0.5, 1e7)]})
    (line,) = charts.lines("loss")
    assert (line.x[-1], line.y[-1]) == (10_000_000, 0.5)
    np.testing.assert_array_equal(line.y[line.x <= 800], series.values[:801])


def test_only_a_change_counts_as_one(charts):
    before = charts.revision
    charts.set_sources([A, B])
    charts.set_options(x_axis="step", grouped=False)
    assert charts.revision == before

    charts.set_options(log_scale=True)

    assert charts.revision == before + 1


def test_an_unknown_option_is_a_mistake_of_the_program(charts):
    with pytest.raises(TypeError):
        charts.set_options(colour="red")


def test_the_table_holds_every_point_that_is_drawn(charts):
    assert charts.table("loss") == [("Run A", 0, 4), ("Run A", 10, 2), ("Run B", 0, 8), ("Run B", 10, 6)]
    assert charts.table("zzz") == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (-1500, "-1.5k"), (200_000, "200k"), (2.5e6, "2.5M"), (7e9, "7G"), (3e12, "3T")],
)
def test_a_large_number_on_an_axis_is_short(value, text):
    assert short_number(value) == text


# ---------------------------------------------------------------------- lines on a screen


def test_a_line_that_fits_is_not_thinned():
    x = np.arange(22.0)
    assert thin_line(x, x, 10)[0] is x


@given(st.integers(23, 500), st.integers(0, 499))
def test_a_thinned_line_keeps_its_ends_and_its_peak_whatever_the_width(count, peak):
    x = np.arange(float(count))
    y = np.zeros(count)
    y[peak % count] = 9.0
    for stretches in (10, 11):
        thin_x, thin_y = thin_line(x, y, stretches)
        assert len(thin_x) <= 2 * stretches + 2
        assert (thin_x[0], thin_x[-1], thin_y.max(), thin_y.min()) == (0, count - 1, 9, 0)
        assert thin_x[thin_y.argmax()] == peak % count
