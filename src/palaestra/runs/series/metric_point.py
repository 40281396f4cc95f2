"""One value of one metric, as people and programs get it; free to import."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MetricPoint"]


class MetricPoint(NamedTuple):
    """A value, the environment step it belongs to and the unix time it was reported."""

    step: int
    value: float
    time: float
