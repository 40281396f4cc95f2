"""Pure functions on counts and numbers: intervals, the chances of k tries, and the test of a paired difference.

`n` is how often something was tried, `c` how often it succeeded. With nothing tried, an interval covers every value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

__all__ = [
    "Passes",
    "confidence_interval",
    "difference_interval",
    "mcnemar",
    "mean_passes",
    "pass_at_k",
    "pass_hat_k",
    "wilson_interval",
]

_Z = NormalDist().inv_cdf((1 + 0.95) / 2)
"""A normal distribution has 95 % of its mass within so many standard deviations."""


def confidence_interval(numbers: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean by Student's t; a single number is its own interval."""
    import numpy as np
    from scipy.special import stdtrit

    n, mean = len(numbers), float(np.mean(numbers))
    if n < 2:
        return mean, mean
    half = float(stdtrit(n - 1, 0.975)) * float(np.std(numbers, ddof=1)) / math.sqrt(n)
    return mean - half, mean + half


def wilson_interval(c: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share; within 0 and 1, and never of no width. (0, 1) when nothing was tried."""
    _check_counts(n, c)
    if n == 0:
        return 0.0, 1.0
    scale = n + _Z * _Z
    middle = (c + _Z * _Z / 2) / scale
    half = _Z * math.sqrt(c * (n - c) / n + _Z * _Z / 4) / scale
    # At either end the bound is exact; rounding would leave a difference of 1e-17.
    return (0.0 if c == 0 else middle - half), (1.0 if c == n else middle + half)


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k tries succeeds: unbiased, 1 - C(n - c, k) / C(n, k)."""
    _check_counts(n, c, k)
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """The chance that all of k tries succeed (pass^k): unbiased, C(c, k) / C(n, k)."""
    _check_counts(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


@dataclass(frozen=True)
class Passes:
    """pass@k and pass^k, averaged over task specs."""

    k: int
    pass_at_k: float
    pass_hat_k: float
    specs: int
    """How many were tried k times or more; the others are left out."""


def mean_passes(counts: Iterable[tuple[int, int]], k: int) -> Passes | None:
    """Both averages over the (n, c) of each task spec; None when none was tried k times."""
    enough = [(n, c) for n, c in counts if n >= k]
    if not enough:
        return None
    at_least_one, all_of_them = (
        math.fsum(chance(n, c, k) for n, c in enough) / len(enough) for chance in (pass_at_k, pass_hat_k)
    )
    return Passes(k, at_least_one, all_of_them, len(enough))


def mcnemar(only_a: int, only_b: int) -> float:
    """The exact two-sided p-value (binomial at one half) that A and B solve equally often.

    Only pairs that one of them solved and the other did not carry information; these are their counts.
    """
    if only_a < 0 or only_b < 0:
        raise ValueError(f"{only_a} and {only_b} pairs: a count cannot be negative.")
    pairs, tail, term = only_a + only_b, 0, 1
    for i in range(min(only_a, only_b) + 1):
        tail += term
        term = term * (pairs - i) // (i + 1)
    # The two tails overlap in the middle when both counts are equal.
    return min(1.0, tail / (1 << pairs) * 2)


def difference_interval(only_a: int, only_b: int, pairs: int) -> tuple[float, float]:
    """Tango's 95 % interval (1998) of the share that A solved minus the share that B solved; (-1, 1) without pairs.

    It inverts the score test of a paired difference: it stays within -1 and 1, keeps a width when A and B always agree,
    and holds its level at small counts. It can differ from the exact test on the border of significance.
    """
    if only_a < 0 or only_b < 0 or only_a + only_b > pairs:
        raise ValueError(f"{only_a} + {only_b} of {pairs} pairs: the parts must be within the whole.")
    if pairs == 0:
        return -1.0, 1.0
    middle = (only_a - only_b) / pairs
    low = _find_difference(only_a, only_b, pairs, _Z, -1.0, middle)
    return low, _find_difference(only_a, only_b, pairs, -_Z, middle, 1.0)


def _find_difference(b: int, c: int, n: int, score: float, low: float, high: float) -> float:
    """The difference at which the score, which falls as the difference grows, equals `score`; by bisection."""
    for _ in range(80):
        middle = (low + high) / 2
        if _tango_score(b, c, n, middle) > score:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _tango_score(b: int, c: int, n: int, difference: float) -> float:
    """How many standard deviations the counts lie from `difference`, at the likeliest value of the nuisance share."""
    linear = (2 * n - b + c) * difference - b - c
    constant = -c * difference * (1 - difference)
    only_b = (math.sqrt(max(0.0, linear * linear - 8 * n * constant)) - linear) / (4 * n)
    variance = n * (2 * only_b + difference * (1 - difference))
    gap = b - c - n * difference
    if variance <= 0:
        return 0.0 if gap == 0 else math.copysign(math.inf, gap)
    return gap / math.sqrt(variance)


def _check_counts(n: int, c: int, k: int | None = None) -> None:
    if not 0 <= c <= n:
        raise ValueError(f"c = {c!r}: must lie between 0 and the {n} that were tried.")
    if k is not None and not 1 <= k <= n:
        raise ValueError(f"k = {k!r}: must lie between 1 and the {n} that were tried.")
