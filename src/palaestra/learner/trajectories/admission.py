"""What gets into an update: proof of each trajectory and group, the algorithm's choice, replay, and the counts.

The source of episodes offers groups through it, the learner trajectories that have not been offered yet. Its counts are
reported with the next update and then start anew.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from palaestra.experience.trajectory import Trajectory
from palaestra.learner.trajectories.algorithm import TrajectoryAlgorithm
from palaestra.learner.trajectories.policy_gradient import all_alike
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
        metrics = {
            "trajectories_offered": float(self.offered),
            "accepted_share": self.admitted / max(1, self.offered),
            "trajectories_refused": float(refused),
        }
        metrics |= {f"refused_{reason.value}": float(self.refused[reason.value]) for reason in Reason}
        if self.offered > refused:
            metrics["reward_mean"] = self.reward / (self.offered - refused)
        if grouped:
            metrics["zero_variance_share"] = self.alike / max(1, self.groups)
            metrics["short_group_share"] = self.short / max(1, self.groups)
        return metrics


class Admission:
    """Decides what of a group is learned from."""

    def __init__(
        self, algorithm: TrajectoryAlgorithm, replay: SuccessReplay, reward: RewardConfig | None = None
    ) -> None:
        self._algorithm, self._replay, self._reward = algorithm, replay, reward or RewardConfig()
        self.counts = Counts()
        self._admitted: dict[str, bool] = {}
        """By name, those admitted and not yet learned from; whether they came from replay."""

    def rewards(self, trajectories: Sequence[Trajectory]) -> Rewards:
        """What each turn of them earns for learning."""
        return [learned_rewards(one, self._reward) for one in trajectories]

    def admit(self, group: Sequence[Trajectory], expected: Expected) -> list[Trajectory]:
        """What of a complete group is worth learning from; nothing when another should be sampled instead."""
        self.counts.offered += len(group)
        proven = self._prove_group([one for one in group if self._prove(one, expected)])
        rewards = self.rewards(proven)
        self.counts.reward += float(sum(earned.sum() for earned in rewards))
        kept = list(self._algorithm.select(proven, rewards))
        if not kept and self._algorithm.group_size > 1:
            filled = self._replay.fill_group(proven, version=expected.version)
            if len(filled) > 1 and why_group_refused(filled) is None:
                kept = list(self._algorithm.select(filled, self.rewards(filled)))
        if self._algorithm.group_size > 1:
            self._count_group(proven, rewards, kept)
        for one in proven:
            self._replay.add(one)
        fresh = {_name(one) for one in proven}
        self._admitted |= {_name(one): _name(one) not in fresh for one in kept}
        self.counts.admitted += sum(_name(one) in fresh for one in kept)
        return kept

    def is_admitted(self, trajectory: Trajectory) -> bool:
        """Whether it has been admitted and not been learned from yet."""
        return _name(trajectory) in self._admitted

    def count_replayed(self, trajectories: Sequence[Trajectory]) -> int:
        """How many of these came from replay: as a member of a group, or added to the update without being admitted."""
        return sum(self._admitted.get(_name(one), True) for one in trajectories)

    def finish_update(self, learned: Sequence[Trajectory]) -> None:
        """Forget what the update learned from, and start counting anew."""
        self.counts = Counts()
        for one in learned:
            self._admitted.pop(_name(one), None)

    def facts(self) -> dict[str, bool]:
        """What has been admitted and waits, for a checkpoint."""
        return dict(self._admitted)

    def load_facts(self, facts: Mapping[str, bool]) -> None:
        """Continue with those."""
        self._admitted, self.counts = dict(facts), Counts()

    def _prove_group(self, members: list[Trajectory]) -> list[Trajectory]:
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

    def _prove(self, trajectory: Trajectory, expected: Expected) -> bool:
        refusal = why_refused(trajectory, expected)
        if refusal is None:
            return True
        self.counts.refused[refusal.reason.value] += 1
        if refusal.reason is not Reason.ENVIRONMENT:
            self.counts.last_refusal = f"{trajectory.episode_id}: {refusal.detail}"
        # A screen that breaks is everyday; everything else means that something is wrong with the recording.
        level = logging.INFO if refusal.reason is Reason.ENVIRONMENT else logging.WARNING
        _log.log(level, "episode %s is not learned from: %s", trajectory.episode_id, refusal.detail)
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
