"""Statistics of evaluations: confidence intervals, pass@k, and the test of a paired difference.

`n` is the number of trials, `c` the number of successes. Without trials, an interval covers every value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist

_Z = NormalDist().inv_cdf((1 + 0.95) / 2)
"""Half-width of the central 95 % of a normal distribution, in standard deviations."""


def wilson_interval(c: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share; (0, 1) without trials."""
    _check_counts(n, c)
    if n == 0:
        return 0.0, 1.0
    scale = n + _Z * _Z
    middle = (c + _Z * _Z / 2) / scale
    half = _Z * math.sqrt(c * (n - c) / n + _Z * _Z / 4) / scale
    # Exact at either end, without rounding error.
    return (0.0 if c == 0 else middle - half), (1.0 if c == n else middle + half)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k trials succeeds (unbiased): 1 - C(n - c, k) / C(n, k)."""
    _check_counts(n, c, k)
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Probability that all of k trials succeed (pass^k, unbiased): C(c, k) / C(n, k)."""
    _check_counts(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


@dataclass(frozen=True)
class Passes:
    """pass@k and pass^k, averaged over task specs."""

    k: int
    pass_at_k: float
    pass_hat_k: float
    specs: int
    """Number of specs with at least k trials; the others are excluded."""


def mean_passes(counts: Iterable[tuple[int, int]], k: int) -> Passes | None:
    """Averages over the (n, c) of each task spec; None if none has k trials."""
    enough = [(n, c) for n, c in counts if n >= k]
    if not enough:
        return None
    at_least_one, all_of_them = (
        math.fsum(chance(n, c, k) for n, c in enough) / len(enough) for chance in (pass_at_k, pass_hat_k)
    )
    return Passes(k, at_least_one, all_of_them, len(enough))


def mcnemar(only_a: int, only_b: int) -> float:
    """Exact two-sided p-value (binomial with 1/2) that A and B have the same success rate.

    The arguments count the pairs that only A, or only B, solved; other pairs carry no information.
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
    """Tango's 95 % score interval (1998) of the success rate of A minus that of B; (-1, 1) without pairs.

    It stays within -1 and 1, has a positive width if A and B always agree, and keeps its level for small counts. It can
    differ from the exact test at the border of significance.
    """
    if only_a < 0 or only_b < 0 or only_a + only_b > pairs:
        raise ValueError(f"{only_a} + {only_b} of {pairs} pairs: the parts must be within the whole.")
    if pairs == 0:
        return -1.0, 1.0
    middle = (only_a - only_b) / pairs
    low = _find_difference(only_a, only_b, pairs, _Z, -1.0, middle)
    return low, _find_difference(only_a, only_b, pairs, -_Z, middle, 1.0)


def _find_difference(b: int, c: int, n: int, score: float, low: float, high: float) -> float:
    """The difference at which the decreasing score function equals `score`, by bisection."""
    for _ in range(80):
        middle = (low + high) / 2
        if _tango_score(b, c, n, middle) > score:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _tango_score(b: int, c: int, n: int, difference: float) -> float:
    """Standardised distance of the counts from `difference`, at the maximum-likelihood nuisance parameter."""
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
