"""The metrics of one attempt on disk: any range of ten million points in a few milliseconds.

`<i>.pts` holds every point of the metric on line i of `names.jsonl`. `<i>.l1` to `<i>.l5` summarize 16, 256, …
neighbouring points per bucket. `commits.log` says how much of these files is valid. All of it is derived from the
journal and can be rebuilt from it.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MetricInfo", "MetricPoint"]


# Defined here because clients need them without importing NumPy.
class MetricPoint(NamedTuple):
    """A value, its environment step and the Unix time at which it was reported."""

    step: int
    value: float
    time: float


class MetricInfo(NamedTuple):
    """One metric of an attempt or run."""

    points: int
    source: str
    """Origin of its values: `journal`, `tensorboard:losses/value_loss`, `stdout:events`."""
