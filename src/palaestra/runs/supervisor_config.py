"""How a supervisor looks after runs, and whom it tells of checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Protocol

from pydantic import Field

from palaestra.config import Section
from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt
from palaestra.runs.record import RunRecord
from palaestra.runs.retention import RetentionPolicy
from palaestra.telemetry.event import Record

__all__ = ["Catalogue", "SupervisorConfig"]


class SupervisorConfig(Section):
    """How runs are looked after."""

    max_running: int = Field(default_factory=lambda: max(1, os.cpu_count() or 1), ge=1)
    """So many at once; the others wait."""
    poll_every_s: float = Field(default=0.05, gt=0)
    """How often telemetry is read."""
    alarm_every_s: float = Field(default=1.0, gt=0)
    """How often every run is looked at."""
    no_episode_steps: int = Field(default=50_000, ge=0)
    """Steps without a finished episode that raise an alarm; 0 never."""
    min_free_disk_mb: int = Field(default=512, ge=0)
    """Below this nothing is launched."""
    sample_every_s: float = Field(default=5.0, gt=0)
    """How often processor, memory and GPUs of every run are looked at."""
    scan_every_s: float = Field(default=5.0, gt=0)
    """How often runs of `palaestra train` alone are looked for."""
    retention: RetentionPolicy = RetentionPolicy()
    """What `palaestra runs gc` does."""


class Catalogue(Protocol):
    """Who keeps the rows of checkpoints. Called from threads, and more than once about the same ones."""

    def seen(self, run: RunRecord, attempt: Attempt, records: Sequence[Record]) -> None:
        """Checkpoints that a trainer announced."""

    def scan(self, run: RunRecord, attempt: Attempt, patterns: Sequence[str]) -> None:
        """An attempt has ended; whatever matches the patterns in its working directory is a checkpoint."""

    def catch_up(self, home: Home, enough: Callable[[], bool] = ...) -> int:
        """The registry was made anew; put everything in that the directories hold."""

    def recall(self, home: Home, run: RunRecord) -> None:
        """A run was put away or brought back; its rows follow what lies there now."""
