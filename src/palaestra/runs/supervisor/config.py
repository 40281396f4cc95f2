"""How a supervisor looks after runs, and whom it tells of checkpoints."""

from __future__ import annotations

import os

from pydantic import Field

from palaestra.config import Section
from palaestra.runs.archive.retention import RetentionPolicy

__all__ = ["SupervisorConfig"]


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
