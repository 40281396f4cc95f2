"""Intervals of a mean and of an interquartile mean over a few runs, and the text of a return.

The interquartile mean and its stratified bootstrap are those of rliable (Agarwal et al., 2021, "Deep Reinforcement
Learning at the Edge of the Statistical Precipice").
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_RESAMPLES = 2000


def confidence_interval(numbers: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean by Student's t; None for fewer than two numbers, which say nothing about the spread."""
    import numpy as np
    from scipy.special import stdtrit

    n = len(numbers)
    if n < 2:
        return None
    mean = float(np.mean(numbers))
    half = float(stdtrit(n - 1, 0.975)) * float(np.std(numbers, ddof=1)) / math.sqrt(n)
    return mean - half, mean + half


def format_return(value: float) -> str:
    """A return for a line of text: `481.2`, `9.37`, `0.9164`. Small rewards need more digits than large ones."""
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.4g}"


def interquartile_mean(numbers: Sequence[float]) -> float:
    """Mean of the middle half: the lowest and the highest quarter (rounded down) are left out."""
    ordered = sorted(numbers)
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    return math.fsum(middle) / len(middle)


def interquartile_mean_interval(
    strata: Sequence[Sequence[float]], *, seed: int = 0, resamples: int = _RESAMPLES
) -> tuple[float, float] | None:
    """95 % percentile-bootstrap interval of the interquartile mean of all numbers.

    A stratum holds the scores of one task. Runs are drawn with replacement within their stratum, so that every resample
    has as many runs of each task as there were. None if a stratum has fewer than two numbers.
    """
    import numpy as np

    if not strata or any(len(stratum) < 2 for stratum in strata):
        return None
    rng = np.random.default_rng(seed)
    parts = []
    for stratum in strata:
        numbers = np.asarray(stratum, dtype=float)
        parts.append(numbers[rng.integers(len(numbers), size=(resamples, len(numbers)))])
    drawn = np.sort(np.concatenate(parts, axis=1), axis=1)
    cut = drawn.shape[1] // 4
    means = drawn[:, cut : drawn.shape[1] - cut].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)
