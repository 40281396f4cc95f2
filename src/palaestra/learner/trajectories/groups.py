"""Episodes that belong together, collected until their group is complete.

Pure bookkeeping: a trajectory comes in once and leaves once. Members arrive in any order from any actor; one that will
never come is declared lost, so that a broken session does not hold the others back. One that comes after its group has
left (it was declared lost, or is one too many) leaves alone, at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from palaestra.errors import ExperienceError
from palaestra.experience.trajectory import Trajectory
from palaestra.learner.trajectories.task_key import group_of, grouped

__all__ = ["Groups", "whole_groups"]

REMEMBERED = 10_000
"""Groups that left and are still known, so that a latecomer is not mistaken for the first of a new group."""


@dataclass
class _Pending:
    members: list[Trajectory] = field(default_factory=list)
    lost: int = 0


class Groups:
    """Collects groups of `size` episodes."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ExperienceError(f"groups of {size}: a group has at least one member.")
        self.size = size
        self._pending: OrderedDict[str, _Pending] = OrderedDict()
        self._left: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        """Trajectories that wait for the rest of their group."""
        return sum(len(group.members) for group in self._pending.values())

    def add(self, trajectory: Trajectory) -> list[Trajectory]:
        """Take one in; the whole group when it is complete now, else nothing."""
        name = group_of(trajectory)
        if self.size == 1 or name in self._left:
            return [trajectory]
        self._pending.setdefault(name, _Pending()).members.append(trajectory)
        return self._released(name)

    def lose(self, group: str, count: int = 1) -> list[Trajectory]:
        """`count` members of this group will not come; the others when they are complete now."""
        if self.size == 1 or group in self._left:
            return []
        self._pending.setdefault(group, _Pending()).lost += count
        return self._released(group)

    def drain(self) -> list[list[Trajectory]]:
        """Everything that still waits, as the incomplete groups it is in; nothing waits afterwards."""
        waiting = [group.members for group in self._pending.values() if group.members]
        self._pending.clear()
        return waiting

    def waiting(self) -> list[Trajectory]:
        """What waits, in the order it came in within each group; it goes on waiting. For a checkpoint."""
        return [member for group in self._pending.values() for member in group.members]

    def losses(self) -> dict[str, int]:
        """How many members of each incomplete group are known to be lost. For a checkpoint."""
        return {name: group.lost for name, group in self._pending.items() if group.lost}

    def restore(self, waiting: Sequence[Trajectory], losses: Mapping[str, int]) -> None:
        """Wait for the same members as when `waiting` and `losses` were taken."""
        self._pending.clear()
        for trajectory in waiting:
            self._pending.setdefault(group_of(trajectory), _Pending()).members.append(trajectory)
        for name, count in losses.items():
            self._pending.setdefault(name, _Pending()).lost = int(count)

    def _released(self, name: str) -> list[Trajectory]:
        group = self._pending[name]
        if len(group.members) + group.lost < self.size:
            return []
        del self._pending[name]
        # Without a name of its own it was collected by its start, which may well be played again.
        if all(member.group for member in group.members):
            self._left[name] = None
        if len(self._left) > REMEMBERED:
            self._left.popitem(last=False)
        return group.members


def whole_groups(trajectories: Sequence[Trajectory], size: int) -> tuple[list[Trajectory], list[Trajectory]]:
    """The first groups that together have at least `size` members, and the rest. No group is cut in two.

    Half a group has another mean than the whole: its advantages would compare each episode with other ones.
    """
    batch: list[Trajectory] = []
    rest: list[Trajectory] = []
    for group in grouped(list(trajectories)):
        (batch if len(batch) < size else rest).extend(group)
    return batch, rest
