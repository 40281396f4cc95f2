"""`UiEvaluation`: how well a model operates screens, told from its trajectories.

Rates are over the episodes in which the screen held. An environment failure is nobody's success and nobody's failure:
it is counted apart and enters no rate. Intervals take episodes as independent; many episodes of one seed are worth less
than as many seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from palaestra.actor.evaluation import confidence_interval
from palaestra.actor.proportion import Passes, mean_passes, wilson_interval
from palaestra.experience.trajectory import Outcome, Trajectory
from palaestra.experience.trajectory_archive import Entry

__all__ = ["TaskScore", "UiEvaluation"]


@dataclass(frozen=True)
class TaskScore:
    """Episodes and what came of them."""

    episodes: tuple[Entry, ...]
    """Those in which the screen held."""
    environment_failed: int = 0
    """Those in which it did not; in none of the numbers below."""

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> TaskScore:
        """Sort out the broken screens."""
        found = list(entries)
        held = tuple(entry for entry in found if entry.outcome is not Outcome.ENVIRONMENT_FAILED)
        return cls(held, len(found) - len(held))

    @property
    def successes(self) -> int:
        """Episodes that the verifier called solved."""
        return sum(entry.success for entry in self.episodes)

    @property
    def success_rate(self) -> float | None:
        """Share of episodes solved; None without any."""
        return self.successes / len(self.episodes) if self.episodes else None

    @property
    def ci95(self) -> tuple[float, float]:
        """95 % interval of the success rate (Wilson's); (0, 1) without episodes."""
        return wilson_interval(self.successes, len(self.episodes))

    @property
    def mean_return(self) -> float | None:
        """What an episode earned, on average."""
        return _mean(entry.reward for entry in self.episodes)

    @property
    def std_return(self) -> float | None:
        """Standard deviation over episodes."""
        mean = self.mean_return
        if mean is None:
            return None
        return math.sqrt(math.fsum((entry.reward - mean) ** 2 for entry in self.episodes) / len(self.episodes))

    @property
    def mean_length(self) -> float | None:
        """Turns per episode."""
        return _mean(entry.steps for entry in self.episodes)

    @property
    def mean_seconds(self) -> float | None:
        """How long an episode took."""
        return _mean(entry.seconds for entry in self.episodes)

    @property
    def unreadable_turns(self) -> float | None:
        """Share of turns whose text could not be read as an action."""
        turns = sum(entry.steps for entry in self.episodes)
        return sum(entry.unreadable_turns for entry in self.episodes) / turns if turns else None

    def share(self, outcome: Outcome) -> float | None:
        """Share of episodes that ended so."""
        return _mean(entry.outcome is outcome for entry in self.episodes)

    def facts(self) -> dict[str, Any]:
        """As plain JSON; null where there is nothing to take a mean of."""
        return {
            "episodes": len(self.episodes), "successes": self.successes, "success_rate": self.success_rate,
            "ci95": list(self.ci95), "mean_return": self.mean_return, "std_return": self.std_return,
            "mean_length": self.mean_length, "mean_seconds": self.mean_seconds,
            "truncated_share": self.share(Outcome.TRUNCATED), "unreadable_share": self.share(Outcome.UNREADABLE),
            "unreadable_turns": self.unreadable_turns, "environment_failed": self.environment_failed,
        }  # fmt: skip


@dataclass(frozen=True)
class UiEvaluation:
    """All episodes of one evaluation, in order of play."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, episodes: Iterable[Trajectory | Entry]) -> UiEvaluation:
        """From trajectories, or from what an archive knows of them; pictures are let go one by one."""
        return cls(tuple(Entry.of(made) if isinstance(made, Trajectory) else made for made in episodes))

    @cached_property
    def overall(self) -> TaskScore:
        """Every task together, each episode counting once."""
        return TaskScore.of(self.entries)

    @cached_property
    def per_task(self) -> dict[str, TaskScore]:
        """By the task's name."""
        ordered = sorted(self.entries, key=lambda entry: entry.task)
        return {task: TaskScore.of(group) for task, group in groupby(ordered, lambda entry: entry.task)}

    @cached_property
    def passes(self) -> tuple[Passes, ...]:
        """pass@k and pass^k for k = 1, 2, 4, … as far as task specs were repeated; empty when none was."""
        counts: dict[tuple[str, str, int], tuple[int, int]] = {}
        for entry in self.overall.episodes:
            n, c = counts.get(entry.spec, (0, 0))
            counts[entry.spec] = n + 1, c + entry.success
        most = max((n for n, _ in counts.values()), default=0)
        if most < 2:
            return ()
        found = (mean_passes(counts.values(), 2**power) for power in range(most.bit_length()))
        return tuple(passes for passes in found if passes is not None)

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        starts = [entry.started_at for entry in self.entries]
        return max(entry.started_at + entry.seconds for entry in self.entries) - min(starts) if starts else 0.0

    def facts(self) -> dict[str, Any]:
        """As plain JSON."""
        returns = tuple(entry.reward for entry in self.overall.episodes)
        versions = [version for entry in self.overall.episodes for version in entry.versions if version >= 0]
        return {
            **self.overall.facts(),
            "return_ci95": list(confidence_interval(returns)) if returns else None,
            "per_task": {task: score.facts() for task, score in self.per_task.items()},
            "passes": [passes.facts() for passes in self.passes],
            "policy_versions": [min(versions), max(versions)] if versions else None,
            "seconds": self.seconds,
        }


def _mean(numbers: Iterable[float]) -> float | None:
    found = list(numbers)
    return math.fsum(found) / len(found) if found else None
