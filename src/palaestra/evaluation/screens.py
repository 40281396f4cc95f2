"""Scores of a model on screens from its trajectories, by task, and paired comparisons of two models.

Episodes with an environment failure are counted separately; they enter no rate and no pair. Intervals assume that
episodes are independent; repeated episodes of one seed carry less information than as many seeds.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from palaestra.evaluation import statistics
from palaestra.experience.trajectory import Outcome, Trajectory
from palaestra.experience.trajectory_archive import TrajectoryEntry
from palaestra.intervals import confidence_interval


@dataclass(frozen=True)
class TaskScore:
    """Scores of a set of episodes; None for means without episodes."""

    episodes: int
    """Number of episodes without an environment failure; all other numbers but the last refer to them."""
    successes: int
    """Number of solved episodes."""
    success_rate: float | None
    ci95: tuple[float, float]
    """95 % Wilson interval of the success rate; (0, 1) without episodes."""
    mean_return: float | None
    std_return: float | None
    mean_length: float | None
    """Turns per episode."""
    mean_seconds: float | None
    truncated_share: float | None
    unreadable_share: float | None
    """Share of episodes that ended because of unreadable replies."""
    unreadable_turns: float | None
    """Share of unreadable turns."""
    environment_failed: int

    @classmethod
    def from_entries(cls, entries: Iterable[TrajectoryEntry]) -> TaskScore:
        """Score these episodes."""
        played = list(entries)
        counted = _without_failures(played)
        n, successes = len(counted), sum(entry.success for entry in counted)
        turns = sum(entry.steps for entry in counted)
        mean_return = _mean(entry.reward for entry in counted)
        variance = None if mean_return is None else _mean((entry.reward - mean_return) ** 2 for entry in counted)
        return cls(
            episodes=n,
            successes=successes,
            success_rate=successes / n if n else None,
            ci95=statistics.wilson_interval(successes, n),
            mean_return=mean_return,
            std_return=None if variance is None else math.sqrt(variance),
            mean_length=_mean(entry.steps for entry in counted),
            mean_seconds=_mean(entry.seconds for entry in counted),
            truncated_share=_mean(entry.outcome is Outcome.TRUNCATED for entry in counted),
            unreadable_share=_mean(entry.outcome is Outcome.UNREADABLE for entry in counted),
            unreadable_turns=sum(entry.unreadable_turns for entry in counted) / turns if turns else None,
            environment_failed=len(played) - n,
        )

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self) | {"ci95": list(self.ci95)}


@dataclass(frozen=True)
class ScreenEvaluation:
    """All episodes of one evaluation, in order of play."""

    entries: tuple[TrajectoryEntry, ...]

    @classmethod
    def from_episodes(cls, episodes: Iterable[Trajectory | TrajectoryEntry]) -> ScreenEvaluation:
        """From trajectories or archive entries; keeps no pictures."""
        return cls(tuple(TrajectoryEntry.of(one) if isinstance(one, Trajectory) else one for one in episodes))

    @cached_property
    def valid_entries(self) -> tuple[TrajectoryEntry, ...]:
        """Episodes without an environment failure."""
        return _without_failures(self.entries)

    @cached_property
    def overall(self) -> TaskScore:
        """Scores over all tasks, each episode counted once."""
        return TaskScore.from_entries(self.entries)

    @cached_property
    def per_task(self) -> dict[str, TaskScore]:
        """Results by task name."""
        ordered = sorted(self.entries, key=lambda entry: entry.task)
        return {task: TaskScore.from_entries(group) for task, group in groupby(ordered, lambda entry: entry.task)}

    @cached_property
    def passes(self) -> tuple[statistics.Passes, ...]:
        """pass@k and pass^k for k = 1, 2, 4, … up to the number of repetitions; empty without repetitions."""
        tries = Counter(entry.spec for entry in self.valid_entries)
        solved = Counter(entry.spec for entry in self.valid_entries if entry.success)
        counts, most = [(n, solved[spec]) for spec, n in tries.items()], max(tries.values(), default=0)
        powers = range(most.bit_length() if most > 1 else 0)
        return tuple(filter(None, (statistics.mean_passes(counts, 2**power) for power in powers)))

    @property
    def policy_versions(self) -> tuple[int, int] | None:
        """Oldest and newest policy version."""
        versions = [version for entry in self.valid_entries for version in entry.versions if version >= 0]
        return (min(versions), max(versions)) if versions else None

    @property
    def seconds(self) -> float:
        """Duration from the first start to the last end."""
        starts = [entry.started_at for entry in self.entries]
        return max(entry.started_at + entry.seconds for entry in self.entries) - min(starts) if starts else 0.0

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        interval = confidence_interval([entry.reward for entry in self.valid_entries])
        return {
            **self.overall.to_json(),
            "return_ci95": interval and list(interval),
            "per_task": {task: score.to_json() for task, score in self.per_task.items()},
            "passes": [asdict(passes) for passes in self.passes],
            "policy_versions": list(self.policy_versions) if self.policy_versions else None,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class PairCounts:
    """Number of pairs solved by both models, by one of them, or by neither."""

    both: int = 0
    only_a: int = 0
    only_b: int = 0
    neither: int = 0

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[TrajectoryEntry, TrajectoryEntry]]) -> PairCounts:
        """Count pairs of (episode of A, episode of B)."""
        counts = Counter((a.success, b.success) for a, b in pairs)
        return cls(counts[True, True], counts[True, False], counts[False, True], counts[False, False])

    def __len__(self) -> int:
        return self.both + self.only_a + self.only_b + self.neither

    @property
    def difference(self) -> float | None:
        """Success rate of A minus that of B; None without pairs."""
        return (self.only_a - self.only_b) / len(self) if len(self) else None

    @property
    def ci95(self) -> tuple[float, float]:
        """95 % interval of the difference (Tango's score interval)."""
        return statistics.difference_interval(self.only_a, self.only_b, len(self))

    @property
    def p_value(self) -> float:
        """p-value of the exact two-sided McNemar test."""
        return statistics.mcnemar(self.only_a, self.only_b)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        numbers = {"difference": self.difference, "ci95": list(self.ci95), "p_value": self.p_value}
        return {"pairs": len(self), **asdict(self), **numbers}


@dataclass(frozen=True)
class ScreenComparison:
    """A against B on the same tasks, pair by pair.

    A pair is one episode of each with equal task, parameters and seed; repeated specs are paired in order of play.
    Episodes without a partner are counted and excluded.
    """

    a: ScreenEvaluation
    b: ScreenEvaluation

    @cached_property
    def pairs(self) -> list[tuple[TrajectoryEntry, TrajectoryEntry]]:
        """Episodes of A and B with equal task, parameters and seed, in the order of A."""
        waiting: defaultdict[tuple[str, str, int], list[TrajectoryEntry]] = defaultdict(list)
        for entry in reversed(self.b.valid_entries):
            waiting[entry.spec].append(entry)
        return [(entry, waiting[entry.spec].pop()) for entry in self.a.valid_entries if waiting.get(entry.spec)]

    @cached_property
    def overall(self) -> PairCounts:
        """All pairs."""
        return PairCounts.from_pairs(self.pairs)

    @cached_property
    def per_task(self) -> dict[str, PairCounts]:
        """Results by task name."""
        ordered = sorted(self.pairs, key=lambda pair: pair[0].task)
        return {task: PairCounts.from_pairs(group) for task, group in groupby(ordered, lambda pair: pair[0].task)}

    @property
    def unpaired_counts(self) -> tuple[int, int]:
        """Number of valid episodes of A and of B without a partner."""
        return len(self.a.valid_entries) - len(self.pairs), len(self.b.valid_entries) - len(self.pairs)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            **self.overall.to_json(),
            "per_task": {task: pairs.to_json() for task, pairs in self.per_task.items()},
            "unpaired_a": self.unpaired_counts[0],
            "unpaired_b": self.unpaired_counts[1],
            "environment_failed_a": self.a.overall.environment_failed,
            "environment_failed_b": self.b.overall.environment_failed,
            "methods": {"p_value": "exact McNemar, two-sided", "ci95": "Tango score interval, paired"},
        }


def _without_failures(entries: Iterable[TrajectoryEntry]) -> tuple[TrajectoryEntry, ...]:
    return tuple(entry for entry in entries if entry.outcome is not Outcome.ENVIRONMENT_FAILED)


def _mean(numbers: Iterable[float]) -> float | None:
    values = list(numbers)
    return math.fsum(values) / len(values) if values else None
