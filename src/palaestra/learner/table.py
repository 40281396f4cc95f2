"""The algorithms we have, as one table by the kind of experience they learn from; a user's own is an address."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palaestra.config import Section, imported, nearest, validated
from palaestra.errors import ConfigError
from palaestra.learner.algorithm import RolloutAlgorithm
from palaestra.learner.ppo import PPO

__all__ = ["ALGORITHMS", "build_algorithm", "find_algorithm"]

ALGORITHMS: dict[str, dict[str, Any]] = {"rollouts": {"ppo": PPO}}
BASES: dict[str, type] = {"rollouts": RolloutAlgorithm}


def find_algorithm(name: str, experience: str = "rollouts") -> Any:
    """The class called `name`, or at that address, for this kind of experience."""
    table, base = ALGORITHMS[experience], BASES[experience]
    if ":" in name:
        cls = imported(name, place="algorithm.name")
        if not (isinstance(cls, type) and issubclass(cls, base)):
            raise ConfigError(
                "algorithm.name",
                name,
                f"is not a subclass of palaestra.learner.{base.__name__}",
                "See docs/algorithms.md",
            )
        return cls
    if name not in table:
        close = nearest(name, table, count=1)
        raise ConfigError(
            "algorithm.name",
            name,
            f"not one of ours on {experience} ({', '.join(table)})",
            f"Did you mean {close[0]!r}?" if close else "For your own class write its address 'package.module:Class'",
        )
    return table[name]


def config_of(name: str, experience: str = "rollouts") -> type[Section]:
    """The configuration section that an algorithm reads."""
    section: type[Section] = find_algorithm(name, experience).config_class
    return section


def build_algorithm(name: str, settings: Mapping[str, Any] | None = None, experience: str = "rollouts") -> Any:
    """The algorithm called `name` (or at that address) with its settings checked."""
    cls = find_algorithm(name, experience)
    return cls(validated(cls.config_class, settings or {}, place="algorithm"))
