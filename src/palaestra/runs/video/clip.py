"""Clips of a run: which there are, what they cost, and which of them go."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from palaestra.files.atomic import read_json, write_json
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.runs.state.attempt_plan import AttemptPlan
from palaestra.runs.wire import API_SCHEMA, Number

__all__ = ["Clip", "ClipReport", "Pace", "clips_of", "pace_of", "prune"]

KEEP = 10
_SUFFIXES = frozenset({".webm", ".mp4", ".gif"})


@dataclass(frozen=True)
class ClipReport:
    """What is written beside a clip of ours, as `<clip>.json`."""

    __pydantic_config__ = API_SCHEMA

    frames: int
    seconds: float
    """Length of the clip."""
    encode_s: float
    """Spent drawing and encoding."""
    sps_with: Number
    """Environment steps a second while it was filmed."""
    sps_without: Number
    """The same without the time that filming took."""
    slowdown: Number
    """The one over the other."""
    checkpoint: str = ""
    episode_return: Number | None = None

    def write(self, clip: Path) -> None:
        """Put it beside the clip."""
        write_json(_note(clip), {"schema": 1, **asdict(self)}, durable=False)


@dataclass(frozen=True)
class Clip:
    """One video file of a run."""

    __pydantic_config__ = API_SCHEMA

    path: str
    attempt: int
    size_bytes: int
    created: float
    report: ClipReport | None = None
    """None for one that the trainer wrote."""


class Pace(NamedTuple):
    """How fast a trainer was while it filmed, and else."""

    sps_with: float
    sps_without: float

    @property
    def slowdown(self) -> float:
        """How many times slower filming made it."""
        return self.sps_without / self.sps_with if self.sps_with > 0 else float("inf")


def clips_of(run: RunDirectory) -> list[Clip]:
    """Every clip, newest first: ours, and those that a trainer wrote where its plan said."""
    found = [_clip(attempt, path) for attempt in run.attempts() for path in _files(attempt)]
    return sorted(found, key=lambda clip: (clip.created, clip.path), reverse=True)


def prune(run: RunDirectory, keep: int = KEEP) -> list[Clip]:
    """Remove all but the newest clips of a run; those that went."""
    gone = clips_of(run)[max(keep, 0) :]
    for clip in gone:
        Path(clip.path).unlink(missing_ok=True)
        _note(Path(clip.path)).unlink(missing_ok=True)
    return gone


def pace_of(progress: Sequence[tuple[float, int]], filmed: Sequence[float]) -> Pace | None:
    """Steps a second in the minutes in which clips were finished, and in the others.

    `progress` is time and step in the order of time, `filmed` the times at which clips were complete. None when there
    is nothing to compare: everything was filmed, or nothing.
    """
    if len(progress) < 2:
        return None
    first, last = progress[0][0], progress[-1][0]
    # Minutes, or smaller parts of a run that took only a few.
    width = min(60.0, max((last - first) / 20, 1e-9))
    busy = {int((when - first) / width) for when in filmed if first <= when <= last}
    steps, seconds = {True: 0, False: 0}, {True: 0.0, False: 0.0}
    for (before, step), (after, next_step) in itertools.pairwise(progress):
        during = int(((before + after) / 2 - first) / width) in busy
        steps[during] += max(0, next_step - step)
        seconds[during] += max(0.0, after - before)
    if not seconds[True] or not seconds[False]:
        return None
    return Pace(steps[True] / seconds[True], steps[False] / seconds[False])


def _files(attempt: Attempt) -> list[Path]:
    plan = AttemptPlan.read(attempt)
    root = attempt.path.resolve()
    found = {path for path in attempt.videos.glob("*") if attempt.videos.is_dir()}
    for pattern in plan.videos if plan is not None else ():
        found.update(attempt.work.glob(pattern))
    return [
        path
        for path in found
        if path.suffix in _SUFFIXES and path.name[0] != "." and path.is_file() and path.resolve().is_relative_to(root)
    ]


def _clip(attempt: Attempt, path: Path) -> Clip:
    facts = path.stat()
    data: dict[str, Any] = read_json(_note(path)) or {}
    data.pop("schema", None)
    try:
        report = ClipReport(**data) if data else None
    except TypeError:
        report = None
    return Clip(str(path), attempt.number, facts.st_size, facts.st_mtime, report)


def _note(clip: Path) -> Path:
    return clip.with_name(f"{clip.name}.json")
