"""The algorithms we have, as a table; a user's own is an address."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palaestra.config import Section, imported, nearest, validated
from palaestra.errors import ConfigError
from palaestra.learner.ppo import PPO, PPOConfig

__all__ = ["ALGORITHMS", "build_algorithm", "config_of"]

ALGORITHMS: dict[str, type[PPO]] = {"ppo": PPO}
CONFIGS: dict[str, type[Section]] = {"ppo": PPOConfig}


def _class_named(name: str) -> type[PPO]:
    if ":" in name:
        cls = imported(name, place="algorithm.name")
        if not (isinstance(cls, type) and issubclass(cls, PPO)):
            raise ConfigError("algorithm.name", name, "is not a subclass of palaestra.learner.PPO")
        return cls
    if name not in ALGORITHMS:
        close = nearest(name, ALGORITHMS, count=1)
        raise ConfigError(
            "algorithm.name", name, f"not one of ours ({', '.join(ALGORITHMS)})",
            f"Did you mean {close[0]!r}?" if close else "For your own class write its address 'package.module:Class'",
        )  # fmt: skip
    return ALGORITHMS[name]


def config_of(name: str) -> type[Section]:
    """The configuration section an algorithm reads."""
    cls = _class_named(name)
    section: type[Section] = getattr(cls, "config_class", PPOConfig)
    return section


def build_algorithm(name: str, settings: Mapping[str, Any]) -> PPO:
    """The algorithm called `name` (or at that address) with its settings checked."""
    config: Any = validated(config_of(name), settings, place="algorithm")
    return _class_named(name)(config)
