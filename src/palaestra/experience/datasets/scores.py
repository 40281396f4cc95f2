"""Reference scores of a dataset: the mean returns of random actions and of an expert, which normalise other returns.

They are Minari's `ref_min_score` and `ref_max_score`. The expert score must be above the random score: with equal ones
there is no scale, and otherwise a better policy would have a lower normalised score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from palaestra.errors import ConfigError, DatasetError

RANDOM_KEY, EXPERT_KEY = "ref_min_score", "ref_max_score"


def normalize_score(mean_return: float, random_score: float | None, expert_score: float | None) -> float | None:
    """0 for the return of random actions and 100 for an expert's.

    None if one is unknown, or if the expert is not better, which older datasets may say.
    """
    if random_score is None or expert_score is None or not expert_score > random_score:
        return None
    return 100.0 * (mean_return - random_score) / (expert_score - random_score)


def read_score(value: object) -> float | None:
    """A reference score of the metadata; None if it is not a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def check_scores(random_score: float | None, expert_score: float | None) -> None:
    """Raise `ConfigError` for a score that is not a finite number, and for an expert that is not above random."""
    for option, score in (("--random-score", random_score), ("--expert-score", expert_score)):
        if score is not None and not math.isfinite(score):
            raise ConfigError(option, score, "is not a finite number")
    if random_score is not None and expert_score is not None and expert_score <= random_score:
        remedy = "Give the mean return of a policy that is better than random actions"
        raise ConfigError("--expert-score", expert_score, _describe_order(random_score), remedy)


def check_metadata_scores(metadata: Mapping[str, Any], remedy: str) -> None:
    """Raise `DatasetError` for scores of Minari's metadata that cannot be used; missing ones and null are unknown."""
    for key in (RANDOM_KEY, EXPERT_KEY):
        if metadata.get(key) is not None and read_score(metadata[key]) is None:
            raise DatasetError(key, metadata[key], "is not a finite number", remedy)
    low, high = (read_score(metadata.get(key)) for key in (RANDOM_KEY, EXPERT_KEY))
    if low is not None and high is not None and high <= low:
        raise DatasetError(EXPERT_KEY, high, _describe_order(low), remedy)


def _describe_order(random_score: float) -> str:
    return f"the expert score must be above the random score, which is {random_score:g}"


@dataclass(frozen=True, kw_only=True)
class MissingScores:
    """Reference scores for data whose metadata does not have them."""

    random: float | None = None
    expert: float | None = None
    measure_random: Callable[[str, Mapping[str, Any]], float] | None = None
    """Measures the random score, if neither the metadata nor `random` has it, in an environment with this id and these
    settings (`env_kwargs`, `max_episode_steps`)."""

    def check(self, random_score: float | None, expert_score: float | None) -> None:
        """Raise `ConfigError` for a score that the metadata has, that is not a number, or that contradicts it."""
        check_scores(self.random, self.expert)
        known = ("--random-score", self.random, random_score), ("--expert-score", self.expert, expert_score)
        for option, given, score in known:
            if given is not None and score is not None:
                raise ConfigError(option, given, f"the metadata of the dataset says {score:g}", "Leave it out")
        if self.random is not None or self.expert is not None:
            check_scores(
                random_score if self.random is None else self.random,
                expert_score if self.expert is None else self.expert,
            )

    def find_for(
        self, env_id: str, random_score: float | None, expert_score: float | None, settings: Mapping[str, Any]
    ) -> dict[str, float]:
        """The scores to add to metadata with this environment and these scores; `ConfigError` for one that it has."""
        self.check(random_score, expert_score)
        low = self.random
        if low is None and random_score is None and self.measure_random is not None:
            if not env_id:
                remedy = "Give the score with --random-score"
                raise ConfigError("--score-episodes", None, "the metadata names no environment to measure in", remedy)
            low = self.measure_random(env_id, settings)
            check_scores(low, expert_score if self.expert is None else self.expert)
        scores = {RANDOM_KEY: low, EXPERT_KEY: self.expert}
        return {key: score for key, score in scores.items() if score is not None}
