"""Warnings on stderr for a run without a progress display: being quiet is no reason to hide trouble."""

from __future__ import annotations

import sys
from typing import TextIO

from palaestra.telemetry.event import Event, LogLine

__all__ = ["NoticeSink"]


class NoticeSink:
    """Writes warnings and errors as lines, and nothing else."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def emit(self, event: Event) -> None:
        """Write a `LogLine` of level warning or above."""
        if isinstance(event, LogLine) and event.level in ("warning", "error", "critical"):
            print(f"{event.level}: {event.text}", file=self._stream or sys.stderr, flush=True)

    def flush(self) -> None:
        """Lines are never held back."""

    def close(self) -> None:
        """Nothing to release."""
