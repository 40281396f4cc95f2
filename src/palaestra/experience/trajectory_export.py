"""Trajectories for other programs: one JSON line each, and every picture once as a file named by its SHA-256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from palaestra.errors import ConfigError
from palaestra.experience.trajectory import SCHEMA, Trajectory
from palaestra.files.atomic import new_file

__all__ = ["export_trajectories", "picture_file_name"]

_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8": "jpeg"}


def picture_file_name(data: bytes) -> str:
    """SHA-256 and the kind of picture: `png`, `jpeg`, `webp`, or `bin` for anything else."""
    kinds = (kind for signature, kind in _SIGNATURES.items() if data.startswith(signature))
    kind = "webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else next(kinds, "bin")
    return f"{hashlib.sha256(data).hexdigest()}.{kind}"


def export_trajectories(trajectories: Iterable[Trajectory], directory: Path) -> int:
    """Write `trajectories.jsonl` and `pictures/` into a new or empty directory; returns how many trajectories."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(
            "output", str(directory), "is there and not empty", "Name a directory that does not exist yet"
        )
    try:
        (directory / "pictures").mkdir(parents=True)
    except OSError as error:
        raise ConfigError("output", str(directory), f"cannot be written ({error.strerror})") from None
    count = 0
    with new_file(directory / "trajectories.jsonl", durable=False) as out:
        for trajectory in trajectories:
            count += 1
            names = {}
            for sha, data in trajectory.pictures.items():
                names[sha] = f"pictures/{picture_file_name(data)}"
                if not (directory / names[sha]).exists():
                    (directory / names[sha]).write_bytes(data)
            out.write(json.dumps(_line(trajectory, names), separators=(",", ":")).encode() + b"\n")
    return count


def _line(trajectory: Trajectory, names: dict[str, str]) -> dict[str, Any]:
    turns = []
    for turn in trajectory.turns:
        facts = {name: getattr(turn, name) for name in ("text", "unreadable", "reward", "image_sizes", "weights")}
        facts |= {name: getattr(turn, name).tolist() for name in ("prompt_ids", "token_ids", "log_probs", "versions")}
        facts["action"] = None if turn.action is None else dict(turn.action)
        facts["pictures"] = [names.get(sha) for sha in turn.pictures]
        turns.append(facts)
    kept = ("episode_id", "reason", "group", "attempt", "session_id", "temperature", "codec", "started_at", "seconds")
    return {
        "schema": SCHEMA, **{name: getattr(trajectory, name) for name in kept}, "task": dict(trajectory.task),
        "outcome": trajectory.outcome.value, "detail": dict(trajectory.detail), "reward": trajectory.total_reward(),
        "last_picture": names.get(trajectory.last_picture), "turns": turns,
    }  # fmt: skip
