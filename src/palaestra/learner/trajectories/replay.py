"""`SuccessReplay`: a replay buffer of recent successes, for starts at which the policy fails or that became rare.

It is bounded per start, per task and by age in versions. Replayed episodes keep their tokens, log-probabilities and
versions, so a policy gradient weighs their tokens as stale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from pydantic import Field
from torch import Tensor

from palaestra.config import Section
from palaestra.experience.groups import pack_trajectories, task_key, task_name, unpack_trajectories
from palaestra.experience.trajectory import Trajectory

PREFIX = "replay"


class ReplayConfig(Section):
    """Use of past successes."""

    fill_groups: bool = False
    """Replace the oldest member of a group in which all failed by a stored success of the same start, so that the group
    has a learning signal (DART, ARPO). Helps if successes are rare. `behaviour_weight` shows how likely the present
    policy is to repeat the stored success."""
    share: float = Field(default=0.0, ge=0, lt=1)
    """Share of stored successes in an update, for algorithms that imitate. Prevents forgetting of rarely sampled tasks;
    if it is too high, the policy imitates its past."""
    per_start: int = Field(default=2, ge=1, le=10_000)
    """Successes kept for each task, params and seed."""
    per_task: int = Field(default=64, ge=1, le=1_000_000)
    """Successes kept for each task; with their screenshots, each may take a megabyte."""
    max_age: int = Field(default=16, ge=0, le=1_000_000)
    """Maximum age of a success in versions, by its oldest token. Older ones are removed."""


class SuccessReplay:
    """The newest successes, by start and by task."""

    def __init__(self, config: ReplayConfig | None = None) -> None:
        self.config = config or ReplayConfig()
        self._kept: dict[str, list[Trajectory]] = {}
        """By task, oldest first."""

    def __len__(self) -> int:
        return sum(len(kept) for kept in self._kept.values())

    def add(self, trajectory: Trajectory) -> None:
        """Store the trajectory if it is a success and the settings use stored ones."""
        is_used = self.config.fill_groups or self.config.share > 0
        if not (is_used and trajectory.success and trajectory.learnable):
            return
        kept = self._kept.setdefault(task_name(trajectory), [])
        kept.append(trajectory)
        same = [one for one in kept if task_key(one) == task_key(trajectory)]
        if len(same) > self.config.per_start:
            kept.remove(same[0])
        if len(kept) > self.config.per_task:
            del kept[0]

    def remove_old(self, version: int) -> None:
        """Remove successes that are too old at this version."""
        oldest = version - self.config.max_age
        young = {name: [one for one in kept if one.versions[0] >= oldest] for name, kept in self._kept.items()}
        self._kept = {name: kept for name, kept in young.items() if kept}

    def fill_group(self, group: Sequence[Trajectory], *, version: int) -> list[Trajectory]:
        """The group; if all members failed, its oldest is replaced by the newest success of the same start."""
        members = list(group)
        if not self.config.fill_groups or len(members) < 2 or any(one.success for one in members):
            return members
        self.remove_old(version)
        key = task_key(members[0])
        stored = [one for one in self._kept.get(task_name(members[0]), []) if task_key(one) == key]
        if not stored:
            return members
        oldest = min(range(len(members)), key=lambda index: (members[index].versions, members[index].started_at))
        members[oldest] = replace(stored[-1], group=members[0].group)
        return members

    def draw(self, fresh: Sequence[Trajectory], *, version: int, rng: np.random.Generator) -> list[Trajectory]:
        """Stored successes to add to `fresh` ones, up to the configured share of the update."""
        if self.config.share <= 0 or not fresh:
            return []
        self.remove_old(version)
        present = {one.episode_id for one in fresh}
        stored = [one for kept in self._kept.values() for one in kept if one.episode_id not in present]
        # Rounded down: the share is an upper limit.
        count = min(len(stored), int(len(fresh) * self.config.share / (1 - self.config.share)))
        return [stored[index] for index in sorted(rng.choice(len(stored), count, replace=False))] if count else []

    def tensors(self) -> dict[str, Tensor]:
        """The stored trajectories, for a checkpoint."""
        return pack_trajectories([one for kept in self._kept.values() for one in kept], PREFIX)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        self._kept = {}
        for one in unpack_trajectories(tensors, PREFIX):
            self._kept.setdefault(task_name(one), []).append(one)
