"""Q-learning and SARSA on a table of action values, and the learner that applies them (Watkins 1989; Rummery 1994).

Transitions are learned from once, in the order in which they were made. `train_freq` transitions are one update, during
which the table that acts does not change; with 1 these are the textbook algorithms step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from palaestra.config import Section
from palaestra.errors import CheckpointError, ExperienceError, NonFiniteError
from palaestra.experience.replay import TransitionBatch
from palaestra.kernels import table_walk
from palaestra.kernels.tabular import scheduled_value
from palaestra.learner.transitions.algorithm import TransitionAlgorithm
from palaestra.policy.tabular import TabularPolicy
from palaestra.transport.source import SavedState


class TabularConfig(Section):
    """Settings of Q-learning and SARSA."""

    learning_rate: float = Field(default=0.5, gt=0, le=1)
    """Share by which a value moves towards its target."""
    learning_rate_final: float | None = Field(default=None, gt=0, le=1)
    """Learning rate at the end of the training. null: it stays. Random environments need a small one to settle."""
    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount factor per step."""
    initial_value: float = Field(default=0.0, ge=-1e9, le=1e9)
    """Value of every action at the start. A value above every possible return explores systematically: actions that
    were not tried look best."""
    exploration_initial: float = Field(default=1.0, ge=0, le=1)
    """Probability of a random action at the start."""
    exploration_final: float = Field(default=0.05, ge=0, le=1)
    """Probability of a random action after `exploration_fraction` of the training."""
    exploration_fraction: float = Field(default=0.5, ge=0, le=1)
    """Share of the training in which the probability changes."""
    schedule: Literal["linear", "exponential"] = "linear"
    """How exploration and learning rate change: by equal differences or by equal ratios."""
    train_freq: int = Field(default=64, ge=1, le=100_000)
    """Steps per update. The table that acts changes between updates; 1 is the textbook algorithm."""

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.schedule == "exponential" and min(self.exploration_initial, self.exploration_final) == 0:
            raise ValueError("an exponential schedule cannot reach 0; give exploration a positive value, or use linear")
        return self


class TabularAlgorithm(TransitionAlgorithm):
    """Updates a table from transitions in their order."""

    config_class: ClassVar[type[Any]] = TabularConfig
    policy: ClassVar[str] = TabularPolicy.name
    target_groups: ClassVar[tuple[str, ...]] = ()
    chooses_next: ClassVar[bool] = False
    """Whether a target needs the action that the policy chooses in the next state."""

    @classmethod
    def find_defect(cls) -> str:
        """Why this class cannot be trained with; empty if it can."""
        return "it has no update_table" if cls.update_table is TabularAlgorithm.update_table else ""

    def update_table(self, table: NDArray[np.float64], columns: dict[str, NDArray[Any]], rate: float) -> float:
        """Learn from transitions `[n]` in order; returns the mean absolute TD error."""
        raise NotImplementedError

    def exploration(self, progress: float) -> float:
        """Probability of a random action after a share `progress` of the training."""
        c = self.config
        is_exponential = c.schedule == "exponential"
        amounts = c.exploration_initial, c.exploration_final
        return scheduled_value(progress, *amounts, c.exploration_fraction, is_exponential)  # type: ignore[no-any-return]

    def learning_rate(self, progress: float) -> float:
        """Learning rate after a share `progress` of the training."""
        c = self.config
        if c.learning_rate_final is None:
            return float(c.learning_rate)
        rates = c.learning_rate, c.learning_rate_final
        return scheduled_value(progress, *rates, 1.0, c.schedule == "exponential")  # type: ignore[no-any-return]


class TabularQLearning(TabularAlgorithm):
    """Off-policy: the target is the value of the best action of the next state."""

    def update_table(self, table: NDArray[np.float64], columns: dict[str, NDArray[Any]], rate: float) -> float:
        """Learn from transitions in order."""
        names = ("observation", "action", "reward", "next_observation", "terminated")
        return float(table_walk.update_q_learning(table, *(columns[n] for n in names), rate, self.config.gamma))


class TabularSarsa(TabularAlgorithm):
    """On-policy: the target is the value of the action that is taken in the next state, exploration included."""

    chooses_next = True

    def update_table(self, table: NDArray[np.float64], columns: dict[str, NDArray[Any]], rate: float) -> float:
        """Learn from transitions in order."""
        names = ("observation", "action", "reward", "next_observation", "next_action", "terminated")
        return float(table_walk.update_sarsa(table, *(columns[n] for n in names), rate, self.config.gamma))


class TabularLearner:
    """Improves a table with a `TabularAlgorithm`. The table is all it changes, so a checkpoint of it is complete."""

    def __init__(
        self, policy: TabularPolicy, algorithm: TabularAlgorithm, *, progress: Callable[[], float] = lambda: 0.0
    ) -> None:
        """`progress` returns the share of the training that is done, for schedules."""
        self.policy, self.algorithm, self._progress = policy, algorithm, progress
        self.version = 0
        self._table = policy.array
        self._table[:] = algorithm.config.initial_value

    def update(self, experience: TransitionBatch, *, poll: Callable[[], None] | None = None) -> dict[str, float]:
        """Learn from `[n, 1]` transitions, states and actions counted from 0."""
        columns = {name: column.reshape(-1) for name, column in experience.columns.items()}
        _check_columns(columns, self._table.shape, chooses_next=self.algorithm.chooses_next)
        before, rate = self._table.copy(), self.algorithm.learning_rate(self._progress())
        error = self.algorithm.update_table(self._table, columns, rate)
        if not np.isfinite(error):
            self._table[:] = before
            reason = "a reward is not finite, or the values diverge"
            raise NonFiniteError(f"the TD error of this update is {error}: {reason}. Lower algorithm.learning_rate.")
        self.version += 1
        return {"td_error": error, "learning_rate": rate, "value_max": float(self._table.max())}

    def weights(self) -> NDArray[np.float64]:
        """The table, not copied."""
        return self._table

    def state(self) -> SavedState:
        """The counters; the table is the policy."""
        return SavedState({}, {"n_updates": self.version, "algorithm": type(self.algorithm).__name__})

    def load_state(self, state: SavedState) -> None:
        """Continue from `state`."""
        self.version = int(state.facts["n_updates"])

    def check_state(self, state: SavedState, *, place: str) -> None:
        """Raise `CheckpointError` if the state belongs to a learner without a table."""
        theirs = str(state.facts.get("algorithm", "PPO"))
        tabular = {cls.__name__ for cls in (TabularQLearning, TabularSarsa, type(self.algorithm))}
        if theirs not in tabular:
            reason = f"was trained by {theirs}, this run trains a table"
            raise CheckpointError("checkpoint", place, reason, "Use the algorithm it was trained with")


def _check_columns(columns: dict[str, NDArray[Any]], shape: tuple[int, int], *, chooses_next: bool) -> None:
    """Raise if a number is outside the table: the kernels do not check their indices."""
    limits = {"observation": shape[0], "next_observation": shape[0], "action": shape[1]}
    if chooses_next:
        limits["next_action"] = shape[1]
    for name, limit in limits.items():
        if name not in columns:
            raise ExperienceError(f"update: the transitions have no column {name!r}.")
        low, high = int(columns[name].min()), int(columns[name].max())
        if low < 0 or high >= limit:
            raise ExperienceError(f"update: {name} has {low if low < 0 else high}, the table has 0 to {limit - 1}.")
