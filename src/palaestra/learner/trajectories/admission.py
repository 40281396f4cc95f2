"""What gets into an update: proof of each trajectory and group, the algorithm's choice, replay, and the count.

Stands between whoever collects groups and the trainer, which asks it again for trajectories it has not seen. What it
counts is reported with the next update and then starts anew.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from palaestra.experience.trajectory import Trajectory
from palaestra.learner.trajectories.algorithm import TrajectoryAlgorithm
from palaestra.learner.trajectories.grpo import all_alike
from palaestra.learner.trajectories.proof import Expected, Reason, why_group_refused, why_refused
from palaestra.learner.trajectories.replay import SuccessReplay
from palaestra.learner.trajectories.reward import RewardConfig, Rewards, learned_rewards

__all__ = ["Admission", "Counts"]

_log = logging.getLogger(__name__)


@dataclass
class Counts:
    """What was offered since the last update, and what became of it."""

    offered: int = 0
    admitted: int = 0
    reward: float = 0.0
    """What all proven ones together earn for learning."""
    groups: int = 0
    alike: int = 0
    """Groups dropped because all their members earned the same."""
    short: int = 0
    """Groups dropped because fewer than two members were left."""
    refused: Counter[str] = field(default_factory=Counter)
    last_refusal: str = ""
    """The sentence of the last one that was not a broken screen."""

    def why_all_refused(self) -> str:
        """Why every episode was refused, broken screens aside; empty when some were not."""
        broken = self.refused[Reason.ENVIRONMENT.value]
        refused = sum(self.refused.values()) - broken
        if not refused or refused + broken < self.offered:
            return ""
        return f"all {refused} episodes whose screen held were refused, the last because {self.last_refusal}."

    def metrics(self, *, grouped: bool) -> dict[str, float]:
        """By the names of the metrics."""
        refused = sum(self.refused.values())
        found = {
            "trajectories_offered": float(self.offered),
            "accepted_share": self.admitted / max(1, self.offered),
            "trajectories_refused": float(refused),
        }
        found |= {f"refused_{reason.value}": float(self.refused[reason.value]) for reason in Reason}
        if self.offered > refused:
            found["reward_mean"] = self.reward / (self.offered - refused)
        if grouped:
            found["zero_variance_share"] = self.alike / max(1, self.groups)
            found["short_group_share"] = self.short / max(1, self.groups)
        return found


class Admission:
    """Decides what of a group is learned from."""

    def __init__(
        self, algorithm: TrajectoryAlgorithm, replay: SuccessReplay, reward: RewardConfig | None = None
    ) -> None:
        self._algorithm, self._replay, self._reward = algorithm, replay, reward or RewardConfig()
        self.counts = Counts()
        self._let_in: dict[str, bool] = {}
        """Those let in and not yet learned from; whether they came from replay."""

    def rewards(self, trajectories: Sequence[Trajectory]) -> Rewards:
        """What each turn of them earns for learning."""
        return [learned_rewards(one, self._reward) for one in trajectories]

    def admit(self, group: Sequence[Trajectory], expected: Expected) -> list[Trajectory]:
        """What of a complete group is worth learning from; nothing when another should be sampled instead."""
        self.counts.offered += len(group)
        proven = self._proven_group([one for one in group if self._proven(one, expected)])
        rewards = self.rewards(proven)
        self.counts.reward += float(sum(earned.sum() for earned in rewards))
        kept = list(self._algorithm.admit(proven, rewards))
        if not kept and self._algorithm.group_size > 1:
            filled = self._replay.filled(proven, version=expected.version)
            if len(filled) > 1 and why_group_refused(filled) is None:
                kept = list(self._algorithm.admit(filled, self.rewards(filled)))
        if self._algorithm.group_size > 1:
            self._count_group(proven, rewards, kept)
        for one in proven:
            self._replay.add(one)
        fresh = {id(one) for one in proven}
        self._let_in |= {_name(one): id(one) not in fresh for one in kept}
        self.counts.admitted += sum(id(one) in fresh for one in kept)
        return kept

    def knows(self, trajectory: Trajectory) -> bool:
        """Whether it has been let in and not been learned from yet."""
        return _name(trajectory) in self._let_in

    def replayed(self, trajectories: Sequence[Trajectory]) -> int:
        """How many of these came from replay."""
        return sum(self._let_in.get(_name(one), False) for one in trajectories)

    def close(self, learned: Sequence[Trajectory]) -> None:
        """An update is over: forget whom it learned from, and count anew."""
        self.counts = Counts()
        for one in learned:
            self._let_in.pop(_name(one), None)

    def facts(self) -> dict[str, bool]:
        """Who has been let in and waits, for a checkpoint."""
        return dict(self._let_in)

    def restore(self, facts: dict[str, bool]) -> None:
        """Continue with those."""
        self._let_in, self.counts = dict(facts), Counts()

    def _proven_group(self, members: list[Trajectory]) -> list[Trajectory]:
        """The members, or none when they cannot be compared with each other."""
        if self._algorithm.group_size == 1 or len(members) < 2:
            return members
        why = why_group_refused(members)
        if why is None:
            return members
        self.counts.refused[Reason.GROUP.value] += len(members)
        self.counts.last_refusal = why
        _log.warning("group %s of %d episodes is not learned from: %s", members[0].group, len(members), why)
        return []

    def _proven(self, trajectory: Trajectory, expected: Expected) -> bool:
        found = why_refused(trajectory, expected)
        if found is None:
            return True
        self.counts.refused[found.reason.value] += 1
        if found.reason is not Reason.ENVIRONMENT:
            self.counts.last_refusal = f"{trajectory.episode_id}: {found.detail}"
        # A screen that breaks is everyday; everything else means that something is wrong with the recording.
        level = logging.INFO if found.reason is Reason.ENVIRONMENT else logging.WARNING
        _log.log(level, "episode %s is not learned from: %s", trajectory.episode_id, found.detail)
        return False

    def _count_group(self, proven: Sequence[Trajectory], rewards: Rewards, kept: Sequence[Trajectory]) -> None:
        self.counts.groups += 1
        if kept:
            return
        if len(proven) < 2:
            self.counts.short += 1
        elif all_alike(rewards):
            self.counts.alike += 1


def _name(trajectory: Trajectory) -> str:
    return f"{trajectory.group} {trajectory.episode_id}"
