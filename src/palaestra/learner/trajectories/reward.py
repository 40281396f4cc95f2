"""Training rewards: a pure function of the recorded rewards, the ending of the episode, and the settings.

The recorded reward is never modified. Environments often return 0 for an unfinished episode and a negative reward for a
mistake; an agent then learns to do nothing until the step limit. Therefore an unfinished episode is penalised like a
mistake, and keeps the positive reward it received.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field

from palaestra.config import Section
from palaestra.experience.trajectory import Outcome, Trajectory

Rewards: TypeAlias = Sequence[npt.NDArray[np.float64]]
"""For each trajectory, the training reward of each turn."""

TOLERANCE = 1e-8
"""Returns closer than this count as equal: dividing by a rounding error would amplify noise."""


class RewardConfig(Section):
    """Training rewards by the ending of an episode. A solved episode keeps the rewards of the environment."""

    truncated: float | None = Field(default=None, ge=-1e6, le=0)
    """Penalty for reaching the step limit; positive reward is kept. null: that of a mistake, which is `reward.failure`,
    or else the minimum of the task's reward range. 0: none; if a mistake costs more, an agent learns to stall."""
    terminated_early: float | None = Field(default=None, ge=-1e6, le=0)
    """Penalty for an episode that the agent ended without solving it; see `truncated`."""
    unreadable: float | None = Field(default=None, ge=-1e6, le=0)
    """Penalty for an episode that ended after too many unreadable replies in a row; see `truncated`."""
    failure: float | None = Field(default=None, ge=-1e6, le=0)
    """Penalty for an episode that the task ended as failed, in place of the one in its last turn; positive reward is
    kept. null: the rewards of the environment."""
    unreadable_reply: float = Field(default=-0.1, ge=-1e6, le=0)
    """Additional penalty for every unreadable reply."""
    step_penalty: float = Field(default=0.0, ge=-1e6, le=0)
    """Additional penalty for every turn of a solved episode, so that shorter solutions earn more. An unsolved episode
    is charged for all turns up to the step limit of its task, so that failing or giving up early earns nothing."""
    assumed_range: tuple[float, float] = (-1.0, 1.0)
    """Range of the return for tasks that declare none. Episodes outside the range of their task are refused."""


def reward_range(trajectory: Trajectory, config: RewardConfig) -> tuple[float, float]:
    """Lowest and highest possible return of the episode."""
    low, high = trajectory.task.get("reward_range") or config.assumed_range
    return float(low), float(high)


def episode_ending(trajectory: Trajectory) -> str:
    """`success`, `failure`, `truncated`, `unreadable`, or `terminated_early` if the agent ended it unsolved."""
    if trajectory.outcome in (Outcome.SUCCESS, Outcome.TRUNCATED, Outcome.UNREADABLE):
        return trajectory.outcome.value
    last: Any = trajectory.turns[-1].action if trajectory.turns else None
    return "terminated_early" if last is not None and last.get("kind") in ("terminate", "answer") else "failure"


def training_rewards(trajectory: Trajectory, config: RewardConfig) -> npt.NDArray[np.float64]:
    """The training reward of each turn. The last turn includes the effect of the ending."""
    rewards = np.array([turn.reward for turn in trajectory.turns], np.float64)
    if not len(rewards):
        return rewards
    rewards[-1] += _total(rewards, trajectory, config) - float(rewards.sum())
    unread = np.array([turn.action is None for turn in trajectory.turns])
    return rewards + config.unreadable_reply * unread + config.step_penalty * _charged_turns(trajectory)


def _total(rewards: npt.NDArray[np.float64], trajectory: Trajectory, config: RewardConfig) -> float:
    """The training return of the episode, without penalties for unreadable replies."""
    paid, ending = float(rewards.sum()), episode_ending(trajectory)
    if ending == "success" or (ending == "failure" and config.failure is None):
        return paid
    if ending == "failure":
        assert config.failure is not None
        # `reward.failure` replaces the penalty in the last turn; positive reward before it is kept.
        return config.failure + max(paid - min(float(rewards[-1]), 0.0), 0.0)
    given: float | None = getattr(config, ending)
    penalty = _mistake_penalty(config, reward_range(trajectory, config)[0]) if given is None else given
    # Penalties of the environment count, so that one mistake is not penalised twice.
    return min(paid, penalty + max(paid, 0.0))


def _charged_turns(trajectory: Trajectory) -> npt.NDArray[np.float64]:
    """How many step penalties each turn is charged: one, and in the last turn of an unsolved episode the rest.

    All unsolved episodes of a task are charged the same, so the order of their returns does not change; a solved one is
    never charged more. Unreadable replies do not count as steps, so there may be more turns than the limit.
    """
    count = len(trajectory.turns)
    limit = int(trajectory.task.get("step_limit") or count)
    charged = np.array([float(number < limit) for number in range(count)])
    if not trajectory.success:
        charged[-1] += limit - charged.sum()
    return charged


def _mistake_penalty(config: RewardConfig, low: float) -> float:
    return min(low, 0.0) if config.failure is None else config.failure


def all_equal(rewards: Rewards) -> bool:
    """Whether all episodes with these rewards have the same return."""
    earned = [float(own.sum()) for own in rewards]
    return max(earned) - min(earned) <= TOLERANCE


def reward_warnings(config: RewardConfig, low: float, *, task: str) -> list[str]:
    """Warnings about settings that reward an agent of this task for not finishing."""
    mistake = _mistake_penalty(config, low)
    return [
        f"reward.{name} = {given:g} is above the reward of a mistake in {task} ({mistake:g}): an agent that does not "
        f"finish gets more than one that tries and fails, and learns not to try. Use null or at most {mistake:g}."
        for name in ("truncated", "terminated_early", "unreadable")
        if (given := getattr(config, name)) is not None and given > mistake
    ]
