"""Intervals whose numbers can be computed by hand."""

import pytest

from palaestra.intervals import confidence_interval, format_return, interquartile_mean, interquartile_mean_interval


def test_fewer_than_two_numbers_have_no_interval():
    assert confidence_interval([]) is confidence_interval([1.0]) is None
    assert interquartile_mean_interval([]) is interquartile_mean_interval([[1.0, 2.0], [3.0]]) is None


def test_two_numbers_have_the_interval_of_students_t_with_one_degree_of_freedom():
    # The half-width is 12.706 * sqrt(2) / sqrt(2).
    assert confidence_interval([0.0, 2.0]) == pytest.approx((-11.706, 13.706), abs=1e-3)


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end():
    assert interquartile_mean([8.0, 1.0, 3.0, 1000.0]) == 5.5  # of 3 and 8
    assert interquartile_mean([1.0, 2.0, 9.0]) == 4.0  # a quarter of three is none
    assert interquartile_mean([-1000.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1000.0]) == 3.5  # of 2, 3, 4 and 5


def test_the_bootstrap_draws_within_each_task_so_equal_runs_of_a_task_have_no_spread():
    # Drawn from all four numbers together, the mean could be anything between 1 and 3.
    assert interquartile_mean_interval([[1.0, 1.0], [3.0, 3.0]]) == (2.0, 2.0)


def test_the_bootstrap_of_two_runs_is_between_them_and_is_the_same_each_time():
    low, high = interquartile_mean_interval([[0.0, 10.0]], seed=3)
    # Both draws are the lower run with probability 1/4, which is more than 2.5 %.
    assert (low, high) == (0.0, 10.0)
    numbers = [[3.0, 5.0, 8.0, 9.0, 14.0]]
    assert interquartile_mean_interval(numbers, seed=3) == interquartile_mean_interval(numbers, seed=3)
    low, high = interquartile_mean_interval(numbers, seed=3)
    assert 3.0 <= low < interquartile_mean(numbers[0]) < high <= 14.0


def test_a_small_return_is_shown_with_more_digits_than_a_large_one():
    texts = [format_return(value) for value in (12345.678, 481.23, 9.375, 0.91642, -0.004, 0.0)]
    assert texts == ["12,345.7", "481.2", "9.375", "0.9164", "-0.004", "0"]
