"""What a checkpoint of ours says about itself, read without torch: its manifest, its counters, its configuration."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palaestra.files.checkpoint import POLICY, read_state
from palaestra.runs.checkpoints.signature import signature_of

__all__ = ["OwnCheckpoint"]

_ADDRESS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w./-]*")
_MAX_HEADER = 16 << 20


@dataclass(frozen=True)
class OwnCheckpoint:
    """The facts of a checkpoint directory."""

    env_step: int = 0
    env_id: str = ""
    algorithm: str = ""
    run_id: str = ""
    score: float | None = None
    returns: tuple[float, ...] = ()
    """Of the last episodes before it was saved, at most 100."""
    env_signature: dict[str, Any] = field(default_factory=dict)
    addresses: tuple[str, ...] = ()
    """Code that its configuration names as `module:name`, which evaluating it would import."""

    @classmethod
    def read(cls, path: Path) -> OwnCheckpoint | None:
        """None when the directory holds no checkpoint of ours, or its state cannot be understood."""
        state = read_state(path)
        if state is None:
            return None
        try:
            about = dict(state.get("about") or {})
            return cls._understood(path, state, about, dict(about.get("config") or {}))
        except (TypeError, ValueError, AttributeError, KeyError, IndexError):
            return None

    @classmethod
    def _understood(
        cls, path: Path, state: dict[str, Any], about: dict[str, Any], config: dict[str, Any]
    ) -> OwnCheckpoint:
        environment = config.get("env") or {}
        tasks = config.get("tasks") or [{}]
        env_id = str(environment.get("id") or tasks[0].get("task") or "")
        score = about.get("score")
        facts, progress = _policy_facts(path / POLICY["vector"]), state["progress"]
        return cls(
            env_step=int(progress.get("steps") or 0),
            env_id=env_id,
            algorithm=str((config.get("algorithm") or {}).get("name", "")),
            run_id=str(about.get("run_id", "")),
            score=float(score) if isinstance(score, int | float) else None,
            returns=tuple(float(value) for value in progress.get("episode_rewards") or ()),
            env_signature=signature_of({"env_id": env_id, **facts}),
            addresses=tuple(sorted(set(_addresses(config)))),
        )

    def digest(self) -> dict[str, float]:
        """How good it was when it was saved."""
        if not self.returns:
            return {}
        best = max(self.returns)
        return {"last": self.returns[-1], "best": best, "mean_100": sum(self.returns) / len(self.returns)}


def _policy_facts(path: Path) -> dict[str, Any]:
    """The spaces that a policy file carries in its header."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER:
                return {}
            facts: dict[str, Any] = json.loads(json.loads(file.read(length))["__metadata__"]["palaestra"])
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return {}
    return {key: facts[key] for key in ("observation_space", "action_space") if isinstance(facts.get(key), dict)}


def _addresses(value: Any) -> Iterator[str]:
    if isinstance(value, str) and _ADDRESS.fullmatch(value):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _addresses(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _addresses(inner)
