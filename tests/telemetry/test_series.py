import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.errors import ConfigError
from palaestra.telemetry.series import Series, SeriesPoint

values = st.lists(st.floats(allow_nan=False), max_size=400)


def of(capacity, numbers):
    series = Series(capacity)
    for step, value in enumerate(numbers):
        series.add(step, value)
    return series


def test_nothing_is_lost_before_the_series_is_full():
    assert of(8, range(8)).points() == [SeriesPoint(i, i) for i in range(8)]


def test_the_ninth_point_thins_the_first_eight_to_their_telling_ones():
    series = of(8, [3, 1, 2, 9, 5, 4, 6, 7, 0])

    # First 3, lowest 1, highest 9 and last 7 of the eight; then the ninth in a bucket of its own.
    assert series.points() == [(0, 3), (1, 1), (3, 9), (7, 7), (8, 0)]


@given(values, st.integers(8, 40))
def test_it_never_holds_more_than_its_capacity(numbers, capacity):
    series = Series(capacity)
    for step, value in enumerate(numbers):
        series.add(step, value)
        assert len(series.points()) <= capacity


@given(values.filter(bool), st.integers(8, 40))
def test_first_last_lowest_and_highest_are_always_kept_and_every_point_is_a_real_one(numbers, capacity):
    points = of(capacity, numbers).points()

    kept = [point.value for point in points]
    assert (points[0], points[-1]) == ((0, numbers[0]), (len(numbers) - 1, numbers[-1]))
    assert (min(kept), max(kept)) == (min(numbers), max(numbers))
    assert all(numbers[point.step] == point.value for point in points)


@given(values, st.integers(8, 40))
def test_points_stay_in_the_order_they_came(numbers, capacity):
    steps = [point.step for point in of(capacity, numbers).points()]

    assert steps == sorted(set(steps))


def test_a_spike_of_one_step_is_still_there_after_a_hundred_thousand():
    series = of(64, [1.0 if step == 777 else 0.0 for step in range(100_000)])

    assert (777, 1.0) in series.points()


def test_the_points_of_a_long_run_are_spread_over_all_of_it():
    steps = [point.step for point in of(64, range(10_000)).points()]

    assert max(later - sooner for sooner, later in pairwise(steps)) <= 10_000 / 8


def test_nan_is_never_an_extreme():
    points = of(8, [math.nan, 2.0, math.nan, 1.0, math.nan, 3.0, 2.0, 2.0, 2.0, 2.0]).points()

    finite = [point.value for point in points if not math.isnan(point.value)]
    assert (min(finite), max(finite)) == (1.0, 3.0)
    assert of(8, [math.nan] * 100).points()[0].step == 0


def test_a_capacity_that_shows_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least 8"):
        Series(7)
