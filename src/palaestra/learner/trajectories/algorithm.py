"""What an algorithm on trajectories is, the ones we have as a table, and a user's own by its address."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from palaestra.config import Section, imported, nearest, validated
from palaestra.errors import ConfigError
from palaestra.experience.trajectory import Trajectory
from palaestra.learner.trajectories.batch import Loss, Sample, TokenBatch
from palaestra.learner.trajectories.grpo import GRPO
from palaestra.learner.trajectories.policy import TokenLogProbs
from palaestra.learner.trajectories.ppo import TrajectoryPPO
from palaestra.learner.trajectories.rejection_sampling import RejectionSampling
from palaestra.learner.trajectories.reward import Rewards

__all__ = ["TRAJECTORY_ALGORITHMS", "TrajectoryAlgorithm", "build_trajectory_algorithm", "trajectory_config_of"]

Values: TypeAlias = Sequence[npt.NDArray[np.float64]]
"""For each trajectory, the value of each of its turns."""


class TrajectoryAlgorithm(Protocol):
    """Decides what to learn from and what to minimise; knows no screen, no queue and no file."""

    @property
    def group_size(self) -> int:
        """How many episodes of the same start are compared; 1: none."""
        ...

    @property
    def supervised(self) -> bool:
        """Whether it raises the likelihood of what it admits: no advantage, no ratio, no correction of stale tokens."""
        ...

    @property
    def needs_values(self) -> bool:
        """Whether it learns a value per turn."""
        ...

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss reads the entropy of each token."""
        ...

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads what the policy said before training."""
        ...

    @property
    def weight_limit(self) -> float:
        """The most a stale token may count."""
        ...

    def admit(self, group: Sequence[Trajectory], rewards: Rewards) -> Sequence[Trajectory]:
        """What of a complete group is worth learning from; nothing when another group should be sampled instead.

        `rewards` are what each turn earns for learning, which is not always what the environment paid.
        """
        ...

    def samples(
        self, trajectories: Sequence[Trajectory], rewards: Rewards, *, values: Values | None = None
    ) -> list[Sample]:
        """The turns to learn from, with their advantages and weights over the whole update."""
        ...

    def loss(self, batch: TokenBatch, now: TokenLogProbs) -> Loss:
        """The part of the objective that a microbatch contributes."""
        ...


TRAJECTORY_ALGORITHMS: dict[str, Any] = {
    "rejection_sampling": RejectionSampling,
    "grpo": GRPO,
    "ppo": TrajectoryPPO,
}

MEMBERS = ("group_size", "supervised", "needs_values", "needs_entropy", "needs_reference", "weight_limit",
           "admit", "samples", "loss", "config_class")  # fmt: skip


def _class_named(name: str) -> Any:
    if ":" in name:
        cls = imported(name, place="algorithm.name")
        missing = [member for member in MEMBERS if not hasattr(cls, member)]
        if not isinstance(cls, type) or missing:
            raise ConfigError(
                "algorithm.name", name,
                f"is no algorithm on trajectories: it lacks {', '.join(missing) or 'being a class'}",
                "See palaestra.learner.trajectories.algorithm.TrajectoryAlgorithm",
            )  # fmt: skip
        for method in ("admit", "samples"):
            if "rewards" not in inspect.signature(getattr(cls, method)).parameters:
                raise ConfigError(
                    "algorithm.name", name, f"its {method} takes no rewards",
                    "They are its second argument, for each trajectory the reward of each turn; use them instead of "
                    "Turn.reward and total_reward()",
                )  # fmt: skip
        return cls
    if name not in TRAJECTORY_ALGORITHMS:
        close = nearest(name, TRAJECTORY_ALGORITHMS, count=1)
        raise ConfigError(
            "algorithm.name", name, f"not one of ours on trajectories ({', '.join(TRAJECTORY_ALGORITHMS)})",
            f"Did you mean {close[0]!r}?" if close else "For your own class write its address 'package.module:Class'",
        )  # fmt: skip
    return TRAJECTORY_ALGORITHMS[name]


def trajectory_config_of(name: str) -> type[Section]:
    """The configuration section an algorithm reads."""
    section: type[Section] = _class_named(name).config_class
    return section


def build_trajectory_algorithm(name: str, settings: Mapping[str, Any] | None = None) -> TrajectoryAlgorithm:
    """The algorithm called `name` (or at that address) with its settings checked."""
    config = validated(trajectory_config_of(name), settings or {}, place="algorithm")
    algorithm: TrajectoryAlgorithm = _class_named(name)(config)
    return algorithm
