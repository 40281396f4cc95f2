"""Two that did the same tasks."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import binomtest

from palaestra.evaluation.statistics import difference_interval, mcnemar


def test_nine_against_one_is_eleven_of_512():
    assert mcnemar(9, 1) == 2 * (1 + 10) / 2**10
    assert mcnemar(1, 9) == mcnemar(9, 1)


def test_equal_counts_and_no_disagreement_say_nothing():
    assert mcnemar(3, 3) == 1.0
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(1, 0) == 1.0


def test_ten_to_nothing_is_one_in_512():
    assert mcnemar(10, 0) == 1 / 512


@given(st.integers(0, 300), st.integers(0, 300))
def test_the_test_is_the_binomial_one_of_scipy(only_a, only_b):
    expected = binomtest(only_a, only_a + only_b).pvalue if only_a + only_b else 1.0
    assert mcnemar(only_a, only_b) == pytest.approx(expected, rel=1e-9)


def test_thousands_of_pairs_are_no_trouble():
    assert 0 < mcnemar(6000, 5000) < 1e-20


def _score(b, c, n, difference):
    """From the likelihood itself: the nuisance is found by search instead of by formula."""

    def unlikely(only_b):
        total = 0.0
        for count, share in ((b, only_b + difference), (c, only_b), (n - b - c, 1 - 2 * only_b - difference)):
            if count:
                total -= count * math.log(max(share, 1e-300))
        return total

    least, most = max(0.0, -difference), (1 - difference) / 2
    only_b = minimize_scalar(unlikely, bounds=(least, most), method="bounded", options={"xatol": 1e-12}).x
    return (b - c - n * difference) / math.sqrt(n * (2 * only_b + difference - difference**2))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_the_interval_holds_exactly_the_differences_that_the_score_test_does_not_reject(b, c, agreed):
    n, edge = b + c + agreed, 1 - 1e-6
    middle = (b - c) / n
    low = brentq(lambda d: _score(b, c, n, d) - 1.959964, -edge, middle)
    high = brentq(lambda d: _score(b, c, n, d) + 1.959964, middle, edge)
    assert difference_interval(b, c, n) == pytest.approx((low, high), abs=1e-4)


def test_full_agreement_on_a_hundred_pairs_leaves_3_7_points_either_way():
    # Without a disagreement the bound is z^2 / (n + z^2) = 3.8415 / 103.8415
    low, high = difference_interval(0, 0, 100)
    assert high == pytest.approx(0.03699, abs=1e-5)
    assert low == -high


def test_a_clean_sweep_ends_at_one_and_no_pair_says_nothing():
    low, high = difference_interval(10, 0, 10)
    assert high == pytest.approx(1.0)
    assert 0.3 < low < 0.7
    assert difference_interval(0, 0, 0) == (-1.0, 1.0)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_swapping_the_two_turns_the_interval_round(b, c, agreed):
    low, high = difference_interval(b, c, b + c + agreed)
    assert difference_interval(c, b, b + c + agreed) == pytest.approx((-high, -low), abs=1e-9)
    if b + c + agreed:
        assert -1 <= low <= (b - c) / (b + c + agreed) <= high <= 1
        assert low < high


def test_counts_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="within the whole"):
        difference_interval(3, 3, 5)
    with pytest.raises(ValueError, match="negative"):
        mcnemar(-1, 3)
