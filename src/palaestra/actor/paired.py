"""Two that did the same tasks: the exact McNemar test, and Tango's interval of the difference.

Only pairs on which they disagree carry information about who is better. The test is exact (two-sided binomial at one
half). The interval inverts the score test of a paired difference (Tango 1998): it stays within -1 and 1, does not
collapse when nobody or everybody agrees, and holds its level at small counts. Being a score interval it can differ from
the exact test on the border of significance.
"""

from __future__ import annotations

import math

from palaestra.actor.proportion import normal_quantile

__all__ = ["difference_interval", "mcnemar"]


def mcnemar(only_a: int, only_b: int) -> float:
    """The exact two-sided p-value that both solve equally often, given how often only one of them did."""
    if only_a < 0 or only_b < 0:
        raise ValueError(f"{only_a} and {only_b} pairs: a count cannot be negative.")
    pairs, tail, term = only_a + only_b, 0, 1
    for i in range(min(only_a, only_b) + 1):
        tail += term
        term = term * (pairs - i) // (i + 1)
    # The two tails overlap in the middle when both counts are equal.
    return min(1.0, tail / (1 << pairs) * 2)


def difference_interval(only_a: int, only_b: int, pairs: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Tango's score interval of the share that A solved minus the share that B solved; (-1, 1) without pairs."""
    if only_a < 0 or only_b < 0 or only_a + only_b > pairs:
        raise ValueError(f"{only_a} + {only_b} of {pairs} pairs: the parts must be within the whole.")
    if pairs == 0:
        return -1.0, 1.0
    z, middle = normal_quantile(confidence), (only_a - only_b) / pairs
    low = _crossing(only_a, only_b, pairs, z, -1.0, middle)
    high = _crossing(only_a, only_b, pairs, -z, middle, 1.0)
    return low, high


def _crossing(b: int, c: int, n: int, wanted: float, low: float, high: float) -> float:
    """Where the score, which falls as the difference grows, comes down to `wanted`."""
    for _ in range(80):
        middle = (low + high) / 2
        if _score(b, c, n, middle) > wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _score(b: int, c: int, n: int, difference: float) -> float:
    """How many standard deviations the counts lie from `difference`, the likeliest nuisance filled in."""
    linear = (2 * n - b + c) * difference - b - c
    constant = -c * difference * (1 - difference)
    only_b = (math.sqrt(max(0.0, linear * linear - 8 * n * constant)) - linear) / (4 * n)
    variance = n * (2 * only_b + difference * (1 - difference))
    gap = b - c - n * difference
    if variance <= 0:
        return 0.0 if gap == 0 else math.copysign(math.inf, gap)
    return gap / math.sqrt(variance)
