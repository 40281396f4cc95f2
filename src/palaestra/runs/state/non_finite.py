"""Metrics that became NaN or infinite: which, since which step, and whether they still are.

A loss that is NaN means that the weights probably are, too, and nothing after it is worth the time. Some metrics are
NaN whenever there is nothing to measure (no episode ended, all returns equal); for those NaN is normal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from palaestra.strict_json import json_number, read_number

__all__ = ["NonFinite", "NonFiniteMetrics"]

_MAY_BE_NAN = ("explained_variance", "success_rate", "mean_reward", "mean_ep_", "ep_", "episode_", "episodic_", "eval_")
"""Prefixes of the last word of metrics that are NaN when there is nothing to measure."""
_FINITE_AGAIN_AFTER = 10
"""Finite values in a row after which a metric has recovered: one that alternates would otherwise come and go."""
_MOST_NAMES = 100


@dataclass
class NonFinite:
    """A metric that has a NaN or infinite value."""

    name: str
    step: int
    """Since when."""
    value: float
    """The last such value."""
    finite_since: int = 0
    """Finite values that came after it; 0: it is the metric's last value."""


class NonFiniteMetrics:
    """Follows the values of all metrics and remembers up to 100 that are not finite."""

    def __init__(self, stored: Iterable[Iterable[Any]] = ()) -> None:
        self._metrics = {
            str(name): NonFinite(str(name), int(step), read_number(value), int(since))
            for name, step, value, since in stored
        }

    def take(self, step: int, metrics: Mapping[str, float]) -> None:
        """Look at the values of one update or episode."""
        if not self._metrics and all(map(math.isfinite, metrics.values())):
            return
        for name, value in metrics.items():
            known = self._metrics.get(name)
            if math.isfinite(value):
                if known is not None:
                    known.finite_since += 1
                    if known.finite_since >= _FINITE_AGAIN_AFTER:
                        del self._metrics[name]
            elif known is not None:
                known.step = known.step if known.finite_since == 0 else step
                known.value, known.finite_since = value, 0
            elif not (math.isnan(value) and _may_be_nan(name)) and len(self._metrics) < _MOST_NAMES:
                self._metrics[name] = NonFinite(name, step, value)

    def to_json(self) -> list[list[Any]]:
        """The state as JSON data, from which another instance continues."""
        return [[one.name, one.step, json_number(one.value), one.finite_since] for one in self._metrics.values()]

    def current(self) -> tuple[NonFinite, ...]:
        """The metrics that are not finite or were so recently, current ones first."""
        return tuple(replace(one) for one in sorted(self._metrics.values(), key=lambda one: one.finite_since))


def _may_be_nan(name: str) -> bool:
    return name.startswith("eval/") or name.rpartition("/")[2].startswith(_MAY_BE_NAN)
