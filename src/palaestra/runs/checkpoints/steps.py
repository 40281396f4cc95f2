"""How many environment steps a checkpoint has learned from, and how that is known.

The evidence, strongest first: what a checkpoint of ours says about itself, what its trainer announced, the counters in
a Stable-Baselines3 zip, the file's name, and the steps that the trainer had logged when it wrote the file. Without any
of these the step is unknown: the step of the run is that of another moment.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from palaestra.files.run_directory import Attempt
from palaestra.runs.checkpoints.own_checkpoint import OwnCheckpoint
from palaestra.telemetry.event import CheckpointSaved, decode

__all__ = ["AttemptSteps", "CheckpointStep", "read_announcements", "step_in_file"]

_NAME = re.compile(r"(?:step|ckpt|checkpoint)[_-]?(\d{1,18})(?!\d)|(?<!\d)(\d{1,18})_steps")
_MAX_COUNTERS = 16 << 20
_METRICS_READ = 16
_POINTS_READ = 4096
_RETURNS = "episode/return"


class CheckpointStep(NamedTuple):
    """A number of environment steps, and where it comes from."""

    env_step: int | None
    """None when unknown."""
    source: str
    """`file`, `announced`, `name`, `log` (a lower bound), `given` at the import, or `unknown`."""


UNKNOWN = CheckpointStep(None, "unknown")


class AttemptSteps:
    """The evidence of one attempt; its journal and series are read once, and only when a checkpoint needs them."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def step_of(self, path: Path, own: OwnCheckpoint | None) -> CheckpointStep:
        """The step of a checkpoint that lies in the attempt."""
        if own is not None:
            return CheckpointStep(own.env_step, "file")
        announced = self._announced.get(path)
        if announced is not None:
            return CheckpointStep(announced[1].env_step, "announced")
        found = step_in_file(path)
        return self._logged_before(path) if found == UNKNOWN else found

    @cached_property
    def _announced(self) -> dict[Path, tuple[float, CheckpointSaved]]:
        bases = (self._attempt.path, self._attempt.work)
        found = list(read_announcements(self._attempt.journal))
        return {(base / event.path).resolve(): (time, event) for time, event in found for base in bases}

    def announcement(self, path: Path) -> tuple[float, CheckpointSaved] | None:
        """When and how the trainer announced a checkpoint; None when it did not."""
        return self._announced.get(path)

    def _logged_before(self, path: Path) -> CheckpointStep:
        """The last step with a time of the trainer's own that is not later than the file."""
        try:
            written = path.stat().st_mtime
        except OSError:
            return UNKNOWN
        steps = [step for step, time in self._logged_steps if time <= written]
        return CheckpointStep(max(steps), "log") if steps else UNKNOWN

    @cached_property
    def _logged_steps(self) -> list[tuple[int, float]]:
        from palaestra.runs.series.reader import SeriesReader

        series = SeriesReader(self._attempt.series)
        # A line of output carries the time at which it was read, which may be long after the file was written.
        timed = [name for name, info in series.names().items() if not info.source.startswith("stdout")]
        wanted = sorted(timed, key=lambda name: name != _RETURNS)[:_METRICS_READ]
        return [(point.step, point.time) for name in wanted for point in series.recent(name, _POINTS_READ)]


def step_in_file(path: Path) -> CheckpointStep:
    """The step of a file in another format than ours: from its counters, else from its name."""
    counted = _counters(path)
    if counted is not None:
        return CheckpointStep(counted, "file")
    named = _NAME.search(path.name)
    return CheckpointStep(int(named[1] or named[2]), "name") if named else UNKNOWN


def read_announcements(journal: Path) -> Iterator[tuple[float, CheckpointSaved]]:
    """Every `CheckpointSaved` of a journal with its time, in order; lines that cannot be read are left out."""
    try:
        with open(journal, "rb") as file:
            for line in file:
                if b'"CheckpointSaved"' in line:
                    try:
                        record = decode(line)
                    except ValueError:
                        continue
                    if isinstance(record.event, CheckpointSaved):
                        yield record.time, record.event
    except OSError:
        return


def _counters(path: Path) -> int | None:
    """The steps that a Stable-Baselines3 zip counts; read as JSON, so that nothing in it runs."""
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.getinfo("data").file_size > _MAX_COUNTERS:
                return None
            steps = json.loads(archive.read("data"))["num_timesteps"]
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        return None
    return steps if isinstance(steps, int) and not isinstance(steps, bool) and steps >= 0 else None
