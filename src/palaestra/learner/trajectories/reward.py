"""What an episode earns for learning: a pure function of what the environment paid, how it ended, and the settings.

The recorded reward stays what the environment paid. An environment often pays nothing for an episode that was never
finished and less than nothing for a mistake; learning from that teaches an agent to do nothing until the steps run out.
So an unfinished episode is charged as much as a mistake, and keeps the credit that it was paid on its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field

from palaestra.config import Section
from palaestra.experience.trajectory import Outcome, Trajectory

__all__ = ["RewardConfig", "Rewards", "all_alike", "ending_of", "learned_rewards", "reward_range_of", "reward_warnings"]

Rewards: TypeAlias = Sequence[npt.NDArray[np.float64]]
"""For each trajectory, the reward of each of its turns."""

ALIKE = 1e-8
"""Rewards closer than this are the same: what is left is rounding, and dividing by it would make a signal of noise."""


class RewardConfig(Section):
    """What the endings of an episode are worth to the learner; a solved one is worth what the environment paid."""

    truncated: float | None = Field(default=None, ge=-1e6, le=0)
    """An episode that ran out of steps, besides the credit it was paid. null: as much as a mistake, which is
    `reward.failure` or else the least that the task pays. 0: what the environment paid; where that is more than a
    mistake earns, an agent learns to stall."""
    terminated_early: float | None = Field(default=None, ge=-1e6, le=0)
    """An episode that the agent itself ended without having solved it; read as `truncated` is."""
    unreadable: float | None = Field(default=None, ge=-1e6, le=0)
    """An episode that ended because too many replies in a row were no action; read as `truncated` is."""
    failure: float | None = Field(default=None, ge=-1e6, le=0)
    """An episode that the task ended as failed, besides the credit it was paid: replaces the charge in its last turn.
    null: what the environment paid."""
    unreadable_reply: float = Field(default=-0.1, ge=-1e6, le=0)
    """Every reply that is no action, in any episode, on top of the others."""
    assumed_range: tuple[float, float] = (-1.0, 1.0)
    """The least and the most that an episode of a task is paid which declares no range. Episodes outside the range of
    their task are refused."""


def reward_range_of(trajectory: Trajectory, config: RewardConfig) -> tuple[float, float]:
    """The least and the most that the episode can have been paid."""
    low, high = trajectory.task.get("reward_range") or config.assumed_range
    return float(low), float(high)


def ending_of(trajectory: Trajectory) -> str:
    """`success`, `failure`, `truncated`, `unreadable`; `terminated_early` when the agent itself ended it unsolved."""
    if trajectory.outcome in (Outcome.SUCCESS, Outcome.TRUNCATED, Outcome.UNREADABLE):
        return trajectory.outcome.value
    last: Any = trajectory.turns[-1].action if trajectory.turns else None
    return "terminated_early" if last is not None and last.get("kind") in ("terminate", "answer") else "failure"


def learned_rewards(trajectory: Trajectory, config: RewardConfig) -> npt.NDArray[np.float64]:
    """The reward of each turn. What the ending changes is in the last one."""
    rewards = np.array([turn.reward for turn in trajectory.turns], np.float64)
    if not len(rewards):
        return rewards
    rewards[-1] += _total(rewards, trajectory, config) - float(rewards.sum())
    unread = np.array([turn.action is None for turn in trajectory.turns])
    return rewards + config.unreadable_reply * unread


def _total(rewards: npt.NDArray[np.float64], trajectory: Trajectory, config: RewardConfig) -> float:
    """What the episode earns in all, unreadable replies aside."""
    paid, ending = float(rewards.sum()), ending_of(trajectory)
    if ending == "success" or (ending == "failure" and config.failure is None):
        return paid
    if ending == "failure":
        assert config.failure is not None
        # `reward.failure` replaces the charge in the last turn; the credit before it is kept, as in an unfinished one.
        return config.failure + max(paid - min(float(rewards[-1]), 0.0), 0.0)
    given: float | None = getattr(config, ending)
    charge = _mistake(config, reward_range_of(trajectory, config)[0]) if given is None else given
    # What the environment has charged already counts, so that one mistake is not charged twice.
    return min(paid, charge + max(paid, 0.0))


def _mistake(config: RewardConfig, low: float) -> float:
    return min(low, 0.0) if config.failure is None else config.failure


def all_alike(rewards: Rewards) -> bool:
    """Whether episodes with these rewards all earned the same, so that none is better than another."""
    earned = [float(own.sum()) for own in rewards]
    return max(earned) - min(earned) <= ALIKE


def reward_warnings(config: RewardConfig, low: float, *, task: str) -> list[str]:
    """What of the configuration pays an agent of this task more for not finishing than for failing."""
    mistake = _mistake(config, low)
    return [
        f"reward.{name} = {given:g} pays more than a mistake in {task} ({mistake:g}): an agent that does not finish "
        f"earns more than one that tries and fails, and learns not to try. Use null or at most {mistake:g}."
        for name in ("truncated", "terminated_early", "unreadable")
        if (given := getattr(config, name)) is not None and given > mistake
    ]
