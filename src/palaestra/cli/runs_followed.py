"""A run as it goes, for whoever waits at a terminal: what happens to it, and a line of numbers now and then."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from palaestra.cli.runs_table import why
from palaestra.cli.terminal import printable
from palaestra.runs.record import RunEvent
from palaestra.telemetry.event import EpisodeSummary, LogLine, TrainingStep

if TYPE_CHECKING:
    from palaestra.runs.client.client import TrainerService
    from palaestra.runs.record import RunRecord
    from palaestra.runs.tools.wandb import Tracking

__all__ = ["followed", "tracking_lines", "waiting"]

_EVERY_S = 2.0
_KEPT = 100
_QUIET = ("note", "first_sign", "adopted")


def followed(service: TrainerService, run_id: str) -> RunRecord:
    """Tell on standard error until the run is over; its last row."""
    returns: list[float] = []
    told = 0.0
    record = service.run(run_id)
    if record.phase == "queued":
        _tell(waiting(record))
    for item in service.stream_events(run_id):
        if isinstance(item, RunEvent):
            if item.happening not in _QUIET:
                reason = why(item.happening, item.reason)
                _tell(f"{item.happening.replace('_', ' ')}{': ' + reason if reason else ''}")
            continue
        event = item.event
        if isinstance(event, EpisodeSummary):
            returns = [*returns[-_KEPT + 1 :], event.episode_return]
        elif isinstance(event, LogLine):
            _tell(event.text)
        elif isinstance(event, TrainingStep) and time.monotonic() - told >= _EVERY_S:
            told = time.monotonic()
            mean = f"   return {sum(returns) / len(returns):,.1f}" if returns else ""
            _tell(f"step {event.env_step:,}{mean}")
    return service.run(run_id)


def waiting(record: RunRecord) -> str:
    """What to say about a run that has not begun."""
    return f"queued: {record.reason or 'waits for its turn'}"


def tracking_lines(tracking: Tracking) -> list[str]:
    """Where W&B has a run, and what uploads it."""
    lines = [f"On W&B: {tracking.url}"] if tracking.url else []
    if tracking.sync_command:
        lines.append(f"Upload it to W&B with: {tracking.sync_command}   ({tracking.remedy})")
    return lines


def _tell(text: str) -> None:
    print(f"  {printable(text)}", file=sys.stderr, flush=True)
