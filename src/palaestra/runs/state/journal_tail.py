"""What the end of a journal tells of a run: how far it is and what it said last. A look, where the series are a study.

Costs the same however long the run is, and imports nothing heavy: `palaestra runs list` asks it about every run of
`palaestra train` alone that lives.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palaestra.runs.state.non_finite import NonFinite, NonFiniteMetrics
from palaestra.strict_json import optional_number, read_numbers

__all__ = ["Told", "told_by"]

_TAIL_BYTES = 1 << 18
_LONG_TAIL_BYTES = 1 << 23
_EPISODES = 100
_LARGEST = 2**63
_KINDS = (b'"EpisodeSummary"', b'"TrainingStep"', b'"PhaseChanged"')


@dataclass
class Told:
    """What a journal's last lines say."""

    phase: str = ""
    """The last that the trainer announced."""
    env_step: int = 0
    episodes: int = 0
    episode_return: float | None = None
    """Mean of the last 100 episodes."""
    non_finite: tuple[NonFinite, ...] = ()
    """Metrics of the last update that are NaN or infinite."""


def told_by(journal: Path) -> Told:
    """Read it; a journal that is not there tells nothing."""
    told, returns, seen = Told(), list[float](), set[bytes]()
    tail = _tail(journal, _TAIL_BYTES)
    if _KINDS[1] not in tail and len(tail) == _TAIL_BYTES:
        # An update of ten thousand metrics is longer than that.
        tail = _tail(journal, _LONG_TAIL_BYTES)
    for line in reversed(tail.split(b"\n")):
        kind = next((kind for kind in _KINDS if kind in line), None)
        if kind is None or (kind in seen and kind != _KINDS[0]):
            continue
        try:
            data = json.loads(line)
        except ValueError:
            continue
        if not isinstance(data, dict):
            continue
        seen.add(kind)
        told.env_step = max(told.env_step, _count(data, "env_step"))
        if kind == _KINDS[0]:
            told.episodes = max(told.episodes, _count(data, "episode"))
            if len(returns) < _EPISODES:
                returns.append(_number(data.get("episode_return")))
        elif kind == _KINDS[1]:
            metrics = data.get("metrics")
            watch = NonFiniteMetrics()
            watch.take(_count(data, "env_step"), read_numbers(metrics) if isinstance(metrics, dict) else {})
            told.non_finite = watch.current()
        elif kind == _KINDS[2]:
            told.phase = str(data.get("phase", ""))
        if len(returns) == _EPISODES and len(seen) == len(_KINDS):
            break
    told.episode_return = sum(returns) / len(returns) if returns else None
    return told


def _count(data: dict[str, Any], name: str) -> int:
    value = data.get(name, 0)
    return value if isinstance(value, int) and 0 <= value < _LARGEST else 0


def _number(value: Any) -> float:
    found = optional_number(value)
    return math.nan if found is None else found


def _tail(path: Path, size: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read(size)
    except OSError:
        return b""
