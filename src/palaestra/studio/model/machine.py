"""The machine of the service: its load, and the queue of runs."""

from __future__ import annotations

from collections import deque

from palaestra.runs.machine import MachineUsage
from palaestra.studio.model.revision import Revised

_MAX_SAMPLES = 120


class MachineModel(Revised):
    """The newest sample, and the last ones for the gauges."""

    def __init__(self) -> None:
        super().__init__()
        self.usage: MachineUsage | None = None
        self.cpu: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self.memory: deque[float] = deque(maxlen=_MAX_SAMPLES)

    def receive(self, usage: MachineUsage) -> None:
        """A sample has arrived."""
        self.usage = usage
        self.cpu.append(usage.cpu)
        if usage.memory_total_bytes:
            self.memory.append(usage.memory_used_bytes / usage.memory_total_bytes)
        self.touch()
