"""Settings of the supervisor."""

from __future__ import annotations

import os

from pydantic import Field

from palaestra.config import Section
from palaestra.runs.archive.retention import RetentionPolicy


class SupervisorConfig(Section):
    """How runs are scheduled and monitored."""

    max_running: int = Field(default_factory=lambda: max(1, os.cpu_count() or 1), ge=1)
    """Maximum number of concurrent runs; further runs are queued."""
    poll_every_s: float = Field(default=0.05, gt=0)
    """Seconds between two reads of telemetry."""
    alarm_every_s: float = Field(default=1.0, gt=0)
    """Seconds between two checks of every run for alarms."""
    no_episode_steps: int = Field(default=50_000, ge=0)
    """Alarm if no episode finishes within this many steps (0: never)."""
    min_free_disk_mb: int = Field(default=512, ge=0)
    """Launches are refused below this much free disk space."""
    sample_every_s: float = Field(default=5.0, gt=0)
    """Seconds between two samples of CPU, memory and GPU usage of every run."""
    scan_every_s: float = Field(default=5.0, gt=0)
    """Seconds between two searches for runs started with `palaestra train`."""
    retention: RetentionPolicy = RetentionPolicy()
    """Retention policy of `palaestra runs gc`."""
