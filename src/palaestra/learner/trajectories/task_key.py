"""Which episodes had the same start, and may be compared with or stand in for each other."""

from __future__ import annotations

import json

from palaestra.experience.trajectory import Trajectory

__all__ = ["group_of", "grouped", "task_key", "task_name"]


def task_name(trajectory: Trajectory) -> str:
    """The task as `suite/name`."""
    return str(trajectory.task.get("task", ""))


def task_key(trajectory: Trajectory) -> str:
    """Task, params and seed: equal for episodes that began on the same screen with the same instruction."""
    params = json.dumps(dict(trajectory.task.get("params", {})), sort_keys=True, default=str)
    return f"{task_name(trajectory)} {params} {trajectory.task.get('seed')}"


def group_of(trajectory: Trajectory) -> str:
    """The group it was sampled for; episodes that name none are compared with those of the same start."""
    return trajectory.group or task_key(trajectory)


def grouped(trajectories: list[Trajectory]) -> list[list[Trajectory]]:
    """The same trajectories by group, groups and members in the order they came."""
    found: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        found.setdefault(group_of(trajectory), []).append(trajectory)
    return list(found.values())
