"""Shares with their intervals, and the chances of k tries."""

import itertools
import subprocess
import sys
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from palaestra.evaluation.statistics import mean_passes, pass_at_k, pass_hat_k, wilson_interval
from palaestra.intervals import confidence_interval


def test_one_number_has_no_interval_and_two_have_a_wide_one():
    # t = 12.71 with one degree of freedom, and the standard error of 0 and 2 is 1.
    assert confidence_interval([]) is confidence_interval([1.0]) is None
    assert confidence_interval([0.0, 2.0]) == pytest.approx((-11.706, 13.706), abs=1e-3)


def test_eight_of_ten_lie_between_49_and_94_percent():
    # z = 1.96, z^2 = 3.84: (8 + 1.92) / 13.84 = 0.7168, 1.96 * sqrt(1.6 + 0.96) / 13.84 = 0.2266
    low, high = wilson_interval(8, 10)
    assert low == pytest.approx(0.4902, abs=1e-4)
    assert high == pytest.approx(0.9433, abs=1e-4)


def test_all_successes_do_not_make_certainty_and_no_trial_says_nothing():
    # With none of n wrong the lower bound is n / (n + z^2): 10 / 13.84
    assert wilson_interval(10, 10) == (pytest.approx(0.7225, abs=1e-4), 1.0)
    assert wilson_interval(0, 10) == (0.0, pytest.approx(0.2775, abs=1e-4))
    assert wilson_interval(0, 0) == (0.0, 1.0)


@given(st.integers(1, 5000), st.data())
def test_wilson_is_what_scipy_says(n, data):
    c = data.draw(st.integers(0, n))
    theirs = binomtest(c, n).proportion_ci(0.95, method="wilson")
    assert wilson_interval(c, n) == pytest.approx((theirs.low, theirs.high), abs=1e-9)


def test_one_right_in_four_is_found_by_two_tries_half_the_time_and_never_twice():
    assert pass_at_k(4, 1, 2) == 0.5  # 1 - C(3, 2) / C(4, 2) = 1 - 3 / 6
    assert pass_hat_k(4, 1, 2) == 0.0
    assert pass_hat_k(4, 3, 2) == 0.5  # C(3, 2) / C(4, 2)


def test_one_try_is_the_share():
    assert pass_at_k(8, 3, 1) == pass_hat_k(8, 3, 1) == 3 / 8


@pytest.mark.parametrize(("c", "expected"), [(0, 0.0), (5, 1.0)])
def test_never_and_always_stay_so_for_every_k(c, expected):
    assert [pass_at_k(5, c, k) for k in range(1, 6)] == [expected] * 5
    assert [pass_hat_k(5, c, k) for k in range(1, 6)] == [expected] * 5


@given(st.integers(1, 8), st.data())
def test_both_are_the_share_among_all_ways_to_draw_k(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    drawn = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(tries) for tries in drawn) / len(drawn))
    assert pass_hat_k(n, c, k) == pytest.approx(sum(all(tries) for tries in drawn) / len(drawn))


def test_thousands_of_samples_do_not_overflow():
    assert pass_at_k(20_000, 1, 10_000) == pytest.approx(0.5)
    assert pass_hat_k(20_000, 19_999, 10_000) == pytest.approx(0.5)


def test_averages_leave_out_tasks_that_were_not_tried_often_enough():
    counts = [(4, 1), (4, 4), (1, 1)]
    found = mean_passes(counts, 2)
    assert asdict(found) == {"k": 2, "pass_at_k": 0.75, "pass_hat_k": 0.5, "specs": 2}
    assert mean_passes(counts, 1).pass_at_k == pytest.approx((0.25 + 1 + 1) / 3)
    assert mean_passes(counts, 5) is None
    assert mean_passes([], 1) is None


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: wilson_interval(3, 2), lambda: wilson_interval(-1, 2), lambda: pass_at_k(3, 1, 4),
        lambda: pass_at_k(0, 0, 1), lambda: pass_hat_k(3, 1, 0),
    ],
)  # fmt: skip
def test_counts_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="must lie between"):
        wrong()


def test_no_statistics_package_is_loaded_for_it():
    code = """
import sys, palaestra.evaluation.statistics
sys.exit(any(name in sys.modules for name in ("scipy", "numpy", "torch")))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
