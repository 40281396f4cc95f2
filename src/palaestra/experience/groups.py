"""Groups of episodes with the same start, and their storage in checkpoints.

`Groups` collects trajectories until their group is complete. Members arrive in any order; a member that will not arrive
is declared lost, so that a failed session does not block its group. A member that arrives after its group was released
is released alone.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from palaestra.errors import ExperienceError
from palaestra.experience.trajectory import Trajectory

MAX_RELEASED = 10_000
"""Number of released groups that are remembered, to recognise late members."""


def task_name(trajectory: Trajectory) -> str:
    """The task as `suite/name`."""
    return str(trajectory.task.get("task", ""))


def task_key(trajectory: Trajectory) -> str:
    """Task, params and seed: equal for episodes with the same start."""
    params = json.dumps(dict(trajectory.task.get("params", {})), sort_keys=True, default=str)
    return f"{task_name(trajectory)} {params} {trajectory.task.get('seed')}"


def group_name(trajectory: Trajectory) -> str:
    """The group of a trajectory; without one, its start."""
    return trajectory.group or task_key(trajectory)


def group_positions(trajectories: Sequence[Trajectory]) -> list[list[int]]:
    """Indices of the members of each group, in order of appearance."""
    groups: dict[str, list[int]] = {}
    for position, trajectory in enumerate(trajectories):
        groups.setdefault(group_name(trajectory), []).append(position)
    return list(groups.values())


def split_groups(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """The trajectories by group, in order of appearance."""
    return [[trajectories[position] for position in group] for group in group_positions(trajectories)]


def whole_groups(trajectories: Sequence[Trajectory], size: int) -> tuple[list[Trajectory], list[Trajectory]]:
    """The first groups that together have at least `size` members, and the rest. No group is split.

    Advantages depend on the mean of the whole group.
    """
    batch: list[Trajectory] = []
    rest: list[Trajectory] = []
    for group in split_groups(trajectories):
        (batch if len(batch) < size else rest).extend(group)
    return batch, rest


class Groups:
    """Collects trajectories into groups of `size`."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ExperienceError(f"groups of {size}: a group has at least one member.")
        self.size = size
        self._waiting: dict[str, list[Trajectory]] = {}
        self._lost: Counter[str] = Counter()
        self._released: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        """Number of trajectories in incomplete groups."""
        return sum(map(len, self._waiting.values()))

    def add(self, trajectory: Trajectory) -> list[Trajectory]:
        """Add a trajectory; returns its group if it is complete now, else nothing."""
        name = group_name(trajectory)
        if self.size == 1 or name in self._released:
            return [trajectory]
        self._waiting.setdefault(name, []).append(trajectory)
        return self._release_if_complete(name)

    def mark_lost(self, group: str) -> list[Trajectory]:
        """Declare a member of a group lost; returns the others if the group is complete now."""
        if self.size == 1 or group in self._released:
            return []
        self._waiting.setdefault(group, [])
        self._lost[group] += 1
        return self._release_if_complete(group)

    def drain(self) -> list[list[Trajectory]]:
        """Remove and return the incomplete groups."""
        groups = [members for members in self._waiting.values() if members]
        self._waiting, self._lost = {}, Counter()
        return groups

    def waiting(self) -> list[Trajectory]:
        """The trajectories of incomplete groups, for a checkpoint."""
        return [member for members in self._waiting.values() for member in members]

    def _release_if_complete(self, name: str) -> list[Trajectory]:
        if len(self._waiting[name]) + self._lost[name] < self.size:
            return []
        members = self._waiting.pop(name)
        del self._lost[name]
        # A group without a name is identified by its start, which may be played again.
        if all(member.group for member in members):
            self._released[name] = None
        if len(self._released) > MAX_RELEASED:
            self._released.popitem(last=False)
        return members


def pack_trajectories(trajectories: Sequence[Trajectory], prefix: str) -> dict[str, Tensor]:
    """One tensor of bytes per trajectory, under names that keep their order, for a checkpoint."""
    return {
        f"{prefix}.{number:06d}": torch.frombuffer(bytearray(one.to_bytes()), dtype=torch.uint8)
        for number, one in enumerate(trajectories)
    }


def unpack_trajectories(tensors: Mapping[str, Tensor], prefix: str) -> list[Trajectory]:
    """The trajectories stored under a prefix, in order, with their digests verified."""
    names = sorted(name for name in tensors if name.startswith(f"{prefix}."))
    return [Trajectory.from_bytes(tensors[name].numpy().tobytes(), place=f"checkpoint, {name}") for name in names]
