"""The metrics of one attempt on disk: any range of ten million points in a few milliseconds.

`<i>.pts` holds every point of the metric on line i of `names.jsonl`. `<i>.l1` to `<i>.l5` summarize 16, 256, …
neighbouring points per bucket. `commits.log` says how much of these files is valid. All of it is derived from the
journal and can be rebuilt from it.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MetricPoint"]


class MetricPoint(NamedTuple):
    """A value, its environment step and the Unix time at which it was reported."""

    # Defined here because clients need it without importing NumPy.
    step: int
    value: float
    time: float
