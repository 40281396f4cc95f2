"""Shares and what they are worth: Wilson's interval, and the chances of k tries from n samples.

Pure arithmetic on counts, on whole numbers as long as possible. `n` is how often something was tried, `c` how often it
came out right. Nothing tried is no error: nothing is known then, and the interval says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

__all__ = ["Passes", "mean_passes", "normal_quantile", "pass_at_k", "pass_hat_k", "wilson_interval"]


def normal_quantile(confidence: float) -> float:
    """How many standard deviations either side hold this share of a normal distribution; 1.96 for 0.95."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence = {confidence!r}: must lie between 0 and 1.")
    return NormalDist().inv_cdf((1 + confidence) / 2)


def wilson_interval(c: int, n: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share; within 0 and 1, and never of no width. (0, 1) when nothing was tried."""
    _check(n, c)
    if n == 0:
        return 0.0, 1.0
    z = normal_quantile(confidence)
    scale = n + z * z
    middle = (c + z * z / 2) / scale
    half = z * math.sqrt(c * (n - c) / n + z * z / 4) / scale
    # At either end the bound is exact, and rounding would leave a hair of 1e-17.
    return (0.0 if c == 0 else middle - half), (1.0 if c == n else middle + half)


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k tries is right: unbiased, 1 - C(n - c, k) / C(n, k)."""
    _check(n, c, k)
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """The chance that all of k tries are right (pass^k): unbiased, C(c, k) / C(n, k)."""
    _check(n, c, k)
    return math.comb(c, k) / math.comb(n, k)


@dataclass(frozen=True)
class Passes:
    """pass@k and pass^k, averaged over task specs."""

    k: int
    pass_at_k: float
    pass_hat_k: float
    specs: int
    """How many were tried k times or more; the others say nothing about k tries and are left out."""

    def facts(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


def mean_passes(counts: Iterable[tuple[int, int]], k: int) -> Passes | None:
    """Both averages over the (n, c) of each task spec; None when none was tried k times."""
    enough = [(n, c) for n, c in counts if n >= k]
    if not enough:
        return None
    return Passes(
        k,
        math.fsum(pass_at_k(n, c, k) for n, c in enough) / len(enough),
        math.fsum(pass_hat_k(n, c, k) for n, c in enough) / len(enough),
        len(enough),
    )


def _check(n: int, c: int, k: int | None = None) -> None:
    if not 0 <= c <= n:
        raise ValueError(f"c = {c!r}: must lie between 0 and the {n} that were tried.")
    if k is not None and not 1 <= k <= n:
        raise ValueError(f"k = {k!r}: must lie between 1 and the {n} that were tried.")
