"""The built-in algorithms by kind of experience and name. A user's own algorithm is given by its import address."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from palaestra.config import Section, closest_names, import_address, parse_section
from palaestra.errors import ConfigError
from palaestra.learner.algorithm import RolloutAlgorithm
from palaestra.learner.ppo import PPO
from palaestra.learner.trajectories.algorithm import TrajectoryAlgorithm
from palaestra.learner.trajectories.built_in import GRPO, RejectionSampling, TrajectoryPPO
from palaestra.learner.trajectories.supervised import Supervised
from palaestra.learner.transitions.algorithm import TransitionAlgorithm
from palaestra.learner.transitions.dqn import DQN
from palaestra.learner.transitions.offline import BC, IQL, TD3BC
from palaestra.learner.transitions.sac import SAC
from palaestra.learner.transitions.tabular import TabularQLearning, TabularSarsa

ALGORITHMS: dict[str, dict[str, Any]] = {
    "rollouts": {"ppo": PPO},
    "trajectories": {
        "rejection_sampling": RejectionSampling,
        "grpo": GRPO,
        "ppo": TrajectoryPPO,
        "supervised": Supervised,
    },
    "transitions": {
        "dqn": DQN,
        "sac": SAC,
        "iql": IQL,
        "td3_bc": TD3BC,
        "bc": BC,
        "q_learning": TabularQLearning,
        "sarsa": TabularSarsa,
    },
}
BASES: dict[str, Any] = {
    "rollouts": RolloutAlgorithm,
    "trajectories": TrajectoryAlgorithm,
    "transitions": TransitionAlgorithm,
}


def find_experience(name: object) -> str:
    """The kind of experience of an algorithm for environments: `transitions`, or `rollouts` for all other names."""
    if not isinstance(name, str):
        return "rollouts"
    if ":" in name:
        cls = import_address(name, place="algorithm.name")
        return "transitions" if isinstance(cls, type) and issubclass(cls, TransitionAlgorithm) else "rollouts"
    return "transitions" if name in ALGORITHMS["transitions"] else "rollouts"


def find_algorithm(name: str, experience: str = "rollouts") -> Any:
    """The algorithm class called `name`, or at that import address, for this kind of experience."""
    table, base = ALGORITHMS[experience], BASES[experience]
    if ":" in name:
        cls = import_address(name, place="algorithm.name")
        is_subclass = isinstance(cls, type) and issubclass(cls, base)
        defect = cls.find_defect() if is_subclass else f"it does not derive from {base.__name__}"
        if defect:
            remedy = f"See palaestra.learner.{base.__name__} and docs/algorithms.md"
            raise ConfigError("algorithm.name", name, f"is not an algorithm on {experience}: {defect}", remedy)
        return cls
    if name not in table:
        if experience == "rollouts":  # environments are also the place of algorithms on transitions
            table = {**table, **ALGORITHMS["transitions"]}
        close = closest_names(name, table, count=1)
        remedy = (
            f"Did you mean {close[0]!r}?" if close else "For your own class write its address 'package.module:Class'"
        )
        kinds = "rollouts or transitions" if experience == "rollouts" else experience
        raise ConfigError(
            "algorithm.name", name, f"is not a built-in algorithm on {kinds} ({', '.join(table)})", remedy
        )
    return table[name]


def config_of(name: str, experience: str = "rollouts") -> type[Section]:
    """The configuration section of an algorithm."""
    section: type[Section] = find_algorithm(name, experience).config_class
    return section


def build_algorithm(name: str, settings: Mapping[str, Any] | None = None, experience: str = "rollouts") -> Any:
    """The algorithm called `name` (or at that import address) with checked settings."""
    cls = find_algorithm(name, experience)
    return cls(parse_section(cls.config_class, settings or {}, place="algorithm"))
