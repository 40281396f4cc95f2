"""`UiComparison`: A against B on the same tasks, pair by pair.

A pair is one episode of each with equal task, parameters and seed; where a spec was played several times, the first of
A meets the first of B and so on. A broken screen pairs with nothing. What finds no partner is counted and left out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from palaestra.actor.paired import difference_interval, mcnemar
from palaestra.actor.ui_evaluation import UiEvaluation
from palaestra.experience.trajectory_archive import Entry

__all__ = ["Pairs", "UiComparison"]


@dataclass(frozen=True)
class Pairs:
    """Who solved what."""

    both: int = 0
    only_a: int = 0
    only_b: int = 0
    neither: int = 0

    @classmethod
    def of(cls, solved: list[tuple[bool, bool]]) -> Pairs:
        """Count (A solved it, B solved it)."""
        return cls(*(solved.count(case) for case in ((True, True), (True, False), (False, True), (False, False))))

    def __len__(self) -> int:
        return self.both + self.only_a + self.only_b + self.neither

    @property
    def difference(self) -> float | None:
        """The share that A solved minus the share that B solved; None without pairs."""
        return (self.only_a - self.only_b) / len(self) if len(self) else None

    @property
    def ci95(self) -> tuple[float, float]:
        """95 % interval of the difference (Tango's score interval)."""
        return difference_interval(self.only_a, self.only_b, len(self))

    @property
    def p_value(self) -> float:
        """Exact McNemar test, two-sided: how likely such a lopsided count is if both are equally good."""
        return mcnemar(self.only_a, self.only_b)

    def facts(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "pairs": len(self), "both": self.both, "only_a": self.only_a, "only_b": self.only_b,
            "neither": self.neither, "difference": self.difference, "ci95": list(self.ci95), "p_value": self.p_value,
        }  # fmt: skip


@dataclass(frozen=True)
class UiComparison:
    """Two evaluations side by side."""

    a: UiEvaluation
    b: UiEvaluation

    @cached_property
    def _matched(self) -> list[tuple[Entry, Entry]]:
        waiting: defaultdict[tuple[str, str, int], list[Entry]] = defaultdict(list)
        for entry in reversed(self.b.overall.episodes):
            waiting[entry.spec].append(entry)
        return [(entry, waiting[entry.spec].pop()) for entry in self.a.overall.episodes if waiting.get(entry.spec)]

    @cached_property
    def overall(self) -> Pairs:
        """All pairs."""
        return Pairs.of([(one.success, other.success) for one, other in self._matched])

    @cached_property
    def per_task(self) -> dict[str, Pairs]:
        """By the task's name."""
        ordered = sorted(self._matched, key=lambda pair: pair[0].task)
        return {
            task: Pairs.of([(one.success, other.success) for one, other in group])
            for task, group in groupby(ordered, lambda pair: pair[0].task)
        }

    @property
    def unpaired_a(self) -> int:
        """Episodes of A, screens that held, that B has no partner for."""
        return len(self.a.overall.episodes) - len(self._matched)

    @property
    def unpaired_b(self) -> int:
        """Likewise of B."""
        return len(self.b.overall.episodes) - len(self._matched)

    def facts(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            **self.overall.facts(),
            "per_task": {task: pairs.facts() for task, pairs in self.per_task.items()},
            "unpaired_a": self.unpaired_a, "unpaired_b": self.unpaired_b,
            "environment_failed_a": self.a.overall.environment_failed,
            "environment_failed_b": self.b.overall.environment_failed,
            "methods": {"p_value": "exact McNemar, two-sided", "ci95": "Tango score interval, paired"},
        }  # fmt: skip
