"""Episodes that belong together: which have the same start, groups that are collected until they are complete.

`Groups` is pure bookkeeping: a trajectory comes in once and leaves once. Members arrive in any order from any actor;
one that will never come is declared lost, so that a broken session does not hold the others back. One that comes after
its group has left (it was declared lost, or is one too many) leaves alone, at once.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from palaestra.errors import ExperienceError
from palaestra.experience.trajectory import Trajectory

__all__ = [
    "Groups",
    "group_name",
    "group_positions",
    "pack_trajectories",
    "split_groups",
    "task_key",
    "task_name",
    "unpack_trajectories",
    "whole_groups",
]

REMEMBERED = 10_000
"""Groups that left and are still known, so that a latecomer is not mistaken for the first of a new group."""


def task_name(trajectory: Trajectory) -> str:
    """The task as `suite/name`."""
    return str(trajectory.task.get("task", ""))


def task_key(trajectory: Trajectory) -> str:
    """Task, params and seed: equal for episodes that began on the same screen with the same instruction."""
    params = json.dumps(dict(trajectory.task.get("params", {})), sort_keys=True, default=str)
    return f"{task_name(trajectory)} {params} {trajectory.task.get('seed')}"


def group_name(trajectory: Trajectory) -> str:
    """The group it was sampled for; episodes that name none are compared with those of the same start."""
    return trajectory.group or task_key(trajectory)


def group_positions(trajectories: Sequence[Trajectory]) -> list[list[int]]:
    """The positions of the members of each group, groups and members in the order they came."""
    groups: dict[str, list[int]] = {}
    for position, trajectory in enumerate(trajectories):
        groups.setdefault(group_name(trajectory), []).append(position)
    return list(groups.values())


def split_groups(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """The same trajectories by group, in the same order."""
    return [[trajectories[position] for position in group] for group in group_positions(trajectories)]


def whole_groups(trajectories: Sequence[Trajectory], size: int) -> tuple[list[Trajectory], list[Trajectory]]:
    """The first groups that together have at least `size` members, and the rest. No group is cut in two.

    Half a group has another mean than the whole: its advantages would compare each episode with other ones.
    """
    batch: list[Trajectory] = []
    rest: list[Trajectory] = []
    for group in split_groups(trajectories):
        (batch if len(batch) < size else rest).extend(group)
    return batch, rest


class Groups:
    """Collects groups of `size` episodes."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ExperienceError(f"groups of {size}: a group has at least one member.")
        self.size = size
        self._waiting: dict[str, list[Trajectory]] = {}
        self._lost: Counter[str] = Counter()
        self._left: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        """Trajectories that wait for the rest of their group."""
        return sum(map(len, self._waiting.values()))

    def add(self, trajectory: Trajectory) -> list[Trajectory]:
        """Take one in; the whole group when it is complete now, else nothing."""
        name = group_name(trajectory)
        if self.size == 1 or name in self._left:
            return [trajectory]
        self._waiting.setdefault(name, []).append(trajectory)
        return self._release_if_complete(name)

    def lose(self, group: str, count: int = 1) -> list[Trajectory]:
        """`count` members of this group will not come; the others when they are complete now."""
        if self.size == 1 or group in self._left:
            return []
        self._waiting.setdefault(group, [])
        self._lost[group] += count
        return self._release_if_complete(group)

    def drain(self) -> list[list[Trajectory]]:
        """Everything that still waits, as the incomplete groups it is in; nothing waits afterwards."""
        groups = [members for members in self._waiting.values() if members]
        self.restore([], {})
        return groups

    def waiting(self) -> list[Trajectory]:
        """What waits, in the order it came in within each group; it goes on waiting. For a checkpoint."""
        return [member for members in self._waiting.values() for member in members]

    def losses(self) -> dict[str, int]:
        """How many members of each incomplete group are known to be lost. For a checkpoint."""
        return {name: self._lost[name] for name in self._waiting if self._lost[name]}

    def restore(self, waiting: Sequence[Trajectory], losses: Mapping[str, int]) -> None:
        """Wait for the same members as when `waiting` and `losses` were taken."""
        self._waiting = {name: [] for name in (*map(group_name, waiting), *losses)}
        self._lost = Counter({name: int(count) for name, count in losses.items()})
        for trajectory in waiting:
            self._waiting[group_name(trajectory)].append(trajectory)

    def _release_if_complete(self, name: str) -> list[Trajectory]:
        if len(self._waiting[name]) + self._lost[name] < self.size:
            return []
        members = self._waiting.pop(name)
        del self._lost[name]
        # Without a name of its own it was collected by its start, which may well be played again.
        if all(member.group for member in members):
            self._left[name] = None
        if len(self._left) > REMEMBERED:
            self._left.popitem(last=False)
        return members


def pack_trajectories(trajectories: Sequence[Trajectory], prefix: str) -> dict[str, Tensor]:
    """One tensor of bytes for each, under names that keep their order, to travel in a checkpoint unpickled."""
    return {
        f"{prefix}.{number:06d}": torch.frombuffer(bytearray(one.to_bytes()), dtype=torch.uint8)
        for number, one in enumerate(trajectories)
    }


def unpack_trajectories(tensors: Mapping[str, Tensor], prefix: str) -> list[Trajectory]:
    """The trajectories under that prefix, in their order; each is checked against its digest."""
    names = sorted(name for name in tensors if name.startswith(f"{prefix}."))
    return [Trajectory.from_bytes(tensors[name].numpy().tobytes(), place=f"checkpoint, {name}") for name in names]
