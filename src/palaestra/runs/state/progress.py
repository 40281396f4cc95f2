"""How far a run has come: the progress of the current attempt, totals over all attempts, and non-finite metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from palaestra.runs.record import RunChanges, RunEvent
from palaestra.strict_json import json_number, optional_number, read_number

_MAY_BE_NAN = ("explained_variance", "success_rate", "mean_reward", "mean_ep_", "ep_", "episode_", "episodic_", "eval_")
"""Prefixes of the last word of metrics that are NaN when there is nothing to measure."""
_RECOVERED_AFTER = 10
"""Finite values in a row after which a metric has recovered; one that alternates stays listed."""
_MAX_NON_FINITE = 100


@dataclass
class NonFiniteMetric:
    """A metric with a NaN or infinite value."""

    name: str
    step: int
    """The first step of the current non-finite stretch."""
    value: float
    """The last non-finite value."""
    finite_since: int = 0
    """Finite values since then; 0: the last value is not finite."""


class NonFiniteTracker:
    """Follows the values of all metrics and remembers up to 100 that are not finite.

    A NaN loss usually means NaN weights, so the rest of the run is wasted. Metrics that are NaN when there is nothing
    to measure (no episode ended, all returns equal) are ignored.
    """

    def __init__(self, stored: Iterable[Iterable[Any]] = ()) -> None:
        self._metrics = {
            str(name): NonFiniteMetric(str(name), int(step), read_number(value), int(since))
            for name, step, value, since in stored
        }

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Process the values of one update or episode."""
        if not self._metrics and all(map(math.isfinite, metrics.values())):
            return
        for name, value in metrics.items():
            known = self._metrics.get(name)
            if math.isfinite(value):
                if known is not None:
                    known.finite_since += 1
                    if known.finite_since >= _RECOVERED_AFTER:
                        del self._metrics[name]
            elif known is not None:
                known.step = known.step if known.finite_since == 0 else step
                known.value, known.finite_since = value, 0
            elif not (math.isnan(value) and _may_be_nan(name)) and len(self._metrics) < _MAX_NON_FINITE:
                self._metrics[name] = NonFiniteMetric(name, step, value)

    def to_json(self) -> list[list[Any]]:
        """The state as JSON data, from which another instance continues."""
        return [[one.name, one.step, json_number(one.value), one.finite_since] for one in self._metrics.values()]

    def current(self) -> tuple[NonFiniteMetric, ...]:
        """The metrics that are not finite or were so recently, current ones first."""
        return tuple(replace(one) for one in sorted(self._metrics.values(), key=lambda one: one.finite_since))


def _may_be_nan(name: str) -> bool:
    return name.startswith("eval/") or name.rpartition("/")[2].startswith(_MAY_BE_NAN)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptProgress:
    """What ingestion knows about one attempt. All counters start with the attempt, across restarts of the service."""

    attempt: int
    seq: int = 0
    """Number of the last record of its journal; 0 before the first."""
    env_step: int = 0
    """The greatest step of any record."""
    update: int = 0
    episodes: int = 0
    episode_return: float | None = None
    """Mean of the last 100 episodes."""
    reported_phase: str = ""
    """The last phase reported by the trainer, such as `succeeded`."""
    tracking_url: str = ""
    """The page of the run in an experiment tracker, once it appears in the output."""
    output_bytes: int = 0
    """Size of stdout.log."""
    source_bytes: int = 0
    """Bytes of journals, output and event files read as telemetry. A silent trainer changes neither this nor
    `output_bytes`."""
    tracebacks: int = 0
    """Python tracebacks in the output."""
    corrupt: int = 0
    """Damaged lines and damaged stretches of event files; all were skipped."""
    episode_lines: int = 0
    """Episodes announced on stdout by trainers whose metrics come from event files: the two should agree."""
    points_left_out: int = 0
    """Points that were not stored: more than 2,000 metrics, or steps beyond 64 bits."""
    dropped: int = 0
    """Telemetry lines and records that could not be read: damaged, bad JSON, unknown kinds."""
    first_dropped: str = ""
    """Place and fault of the first of them."""
    non_finite: tuple[NonFiniteMetric, ...] = ()
    """Metrics that are NaN or infinite, or were so a few values ago."""
    disk_full: bool = False
    problem: str = ""
    """Why ingestion is blocked at the moment; it retries every second and loses nothing."""


@dataclass(frozen=True)
class RunTotals:
    """How far a run had come before its current attempt."""

    env_step: int = 0
    episodes: int = 0
    episode_return: float | None = None

    @classmethod
    def before_attempt(cls, events: Iterable[RunEvent], attempt: int) -> RunTotals:
        """The totals recorded at the end of the previous attempts."""
        totals = cls()
        for event in events:
            if event.attempt < attempt and "env_step" in event.facts:
                totals = cls(
                    _count(event.facts["env_step"]),
                    _count(event.facts.get("episodes")),
                    optional_number(event.facts.get("episode_return")),
                )
        return totals

    def new_steps(self, progress: AttemptProgress) -> int:
        """Steps taken by the current attempt."""
        return max(0, progress.env_step - self.env_step)

    def columns_with(self, progress: AttemptProgress) -> RunChanges:
        """Columns of the row, current attempt included. A resumed trainer continues its steps and restarts episodes."""
        mean = progress.episode_return
        return {
            "env_step": max(self.env_step, progress.env_step),
            "episodes": self.episodes + progress.episodes,
            "episode_return": self.episode_return if mean is None else mean,
        }


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
