"""Clips of a run: listing and pruning them, and how much recording slowed the trainer down."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from palaestra.files.atomic import read_json, write_json
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.runs.state.attempt_files import AttemptPlan
from palaestra.runs.wire import API_SCHEMA, Number, from_json

MAX_CLIPS = 10
CLIP_SUFFIXES = frozenset({".webm", ".mp4", ".gif"})


@dataclass(frozen=True)
class ClipReport:
    """Report stored beside a clip as `<clip>.json`."""

    __pydantic_config__ = API_SCHEMA

    frames: int
    seconds: float
    """Duration of the clip."""
    encode_s: float
    """Time for rendering and encoding."""
    sps_with: Number
    """Environment steps per second during the recording."""
    sps_without: Number
    """The same without the time for rendering and encoding."""
    slowdown: Number
    """Ratio of the two."""
    checkpoint: str = ""
    episode_return: Number | None = None

    def write(self, clip: Path) -> None:
        """Write the report beside its clip."""
        write_json(_report_path(clip), {"schema": 1, **asdict(self)}, durable=False)


@dataclass(frozen=True)
class Clip:
    """One video file of a run."""

    __pydantic_config__ = API_SCHEMA

    path: str
    attempt: int
    size_bytes: int
    created: float
    report: ClipReport | None = None
    """None when the trainer recorded the clip."""


@dataclass(frozen=True, kw_only=True)
class NamedClip(Clip):
    """One video file of a run, as the HTTP API lists it."""

    name: str
    """Name in the route that returns the file: the path below the run's directory."""

    @classmethod
    def of(cls, clip: Clip, run: RunDirectory) -> NamedClip:
        """A clip with its name. A trainer may use one file name in two directories, so it is a path."""
        return cls(**{**vars(clip), "name": str(Path(clip.path).relative_to(run.path))})


class RecordingOverhead(NamedTuple):
    """Speed of a trainer with and without recording, in steps per second."""

    sps_with: float
    sps_without: float

    @property
    def slowdown(self) -> float:
        """Factor by which recording slowed the trainer down."""
        return self.sps_without / self.sps_with if self.sps_with > 0 else float("inf")


def list_clips(run: RunDirectory) -> list[Clip]:
    """Return all clips, newest first: recorded ones, and those that the trainer wrote according to its plan."""
    clips = [_read_clip(attempt, path) for attempt in run.attempts() for path in _find_files(attempt)]
    return sorted(clips, key=lambda clip: (clip.created, clip.path), reverse=True)


def prune_clips(run: RunDirectory, keep: int = MAX_CLIPS) -> list[Clip]:
    """Delete all but the newest clips of a run and return the deleted ones."""
    deleted = list_clips(run)[max(keep, 0) :]
    for clip in deleted:
        Path(clip.path).unlink(missing_ok=True)
        _report_path(Path(clip.path)).unlink(missing_ok=True)
    return deleted


def measure_recording_overhead(run: RunDirectory) -> RecordingOverhead | None:
    """Return how much recording slowed the trainer itself down; None when it recorded nothing."""
    recorded = [clip.created for clip in list_clips(run) if clip.report is None]
    if not recorded:
        return None
    from palaestra.runs.series.reader import RunSeries

    points = RunSeries(run).decimate("episode/return", 2000)
    return compute_recording_overhead(sorted((point.time, point.step) for point in points), recorded)


def compute_recording_overhead(
    progress: Sequence[tuple[float, int]], recorded: Sequence[float]
) -> RecordingOverhead | None:
    """Compare the speed in the minutes in which clips were finished with that of the others.

    `progress` holds time and step in order of time, `recorded` the times at which clips were completed. None when one
    of the two groups is empty.
    """
    if len(progress) < 2:
        return None
    first, last = progress[0][0], progress[-1][0]
    # Minutes, or shorter intervals for a short run.
    width = min(60.0, max((last - first) / 20, 1e-9))
    busy = {int((when - first) / width) for when in recorded if first <= when <= last}
    steps, seconds = {True: 0, False: 0}, {True: 0.0, False: 0.0}
    for (before, step), (after, next_step) in itertools.pairwise(progress):
        during = int(((before + after) / 2 - first) / width) in busy
        steps[during] += max(0, next_step - step)
        seconds[during] += max(0.0, after - before)
    if not seconds[True] or not seconds[False]:
        return None
    return RecordingOverhead(steps[True] / seconds[True], steps[False] / seconds[False])


def _find_files(attempt: Attempt) -> list[Path]:
    root = attempt.path.resolve()
    paths = set(attempt.videos.glob("*"))
    for pattern in AttemptPlan.read(attempt).videos:
        paths.update(attempt.work.glob(pattern))
    return [
        path
        for path in paths
        if path.suffix in CLIP_SUFFIXES
        and path.name[0] != "."
        and path.is_file()
        and path.resolve().is_relative_to(root)
    ]


def _read_clip(attempt: Attempt, path: Path) -> Clip:
    stat, data = path.stat(), read_json(_report_path(path))
    try:
        report = None if data is None else from_json(ClipReport, data)
    except TypeError:
        report = None
    return Clip(str(path), attempt.number, stat.st_size, stat.st_mtime, report)


def _report_path(clip: Path) -> Path:
    return clip.with_name(f"{clip.name}.json")
