"""Trajectories for other programs: one JSON line each, and their pictures as files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from palaestra.errors import ConfigError
from palaestra.experience.trajectory import ARRAYS, SCHEMA, Trajectory
from palaestra.experience.trajectory_archive import picture_file_name
from palaestra.files.atomic import atomic_file

__all__ = ["export_trajectories"]


def export_trajectories(trajectories: Iterable[Trajectory], directory: Path) -> int:
    """Write `trajectories.jsonl` and `pictures/` into a new or empty directory; returns how many trajectories."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        remedy = "Name a directory that does not exist yet"
        raise ConfigError("output", str(directory), "is there and not empty", remedy)
    try:
        (directory / "pictures").mkdir(parents=True)
    except OSError as error:
        raise ConfigError("output", str(directory), f"cannot be written ({error.strerror})") from None
    count = 0
    with atomic_file(directory / "trajectories.jsonl", durable=False) as out:
        for trajectory in trajectories:
            count += 1
            names = {}
            for sha, data in trajectory.pictures.items():
                names[sha] = f"pictures/{picture_file_name(data)}"
                if not (directory / names[sha]).exists():
                    (directory / names[sha]).write_bytes(data)
            out.write(json.dumps(_export_facts(trajectory, names), separators=(",", ":")).encode() + b"\n")
    return count


def _export_facts(trajectory: Trajectory, names: Mapping[str, str]) -> dict[str, Any]:
    """Everything about a trajectory as plain JSON; `names` gives the file of each picture."""
    turns = [
        turn.facts()
        | {name: getattr(turn, name).tolist() for name in ARRAYS}
        | {"pictures": [names.get(sha) for sha in turn.pictures]}
        for turn in trajectory.turns
    ]
    episode = trajectory.facts() | {"reward": trajectory.total_reward()}
    return {"schema": SCHEMA, **episode, "last_picture": names.get(trajectory.last_picture), "turns": turns}
