"""The machine as clients see it: its usage, the queue, and the service itself."""

from __future__ import annotations

import os
from dataclasses import dataclass

from palaestra.runs.process.machine_usage import HardwareUsage, own_memory_bytes
from palaestra.runs.supervisor.queue import QueueStatus


@dataclass(frozen=True, kw_only=True)
class MachineUsage(HardwareUsage, QueueStatus):
    """Usage of the machine, the queue, and the service itself."""

    service_pid: int
    service_memory_bytes: int
    """Resident memory of the service."""

    @classmethod
    def of(cls, hardware: HardwareUsage, queue: QueueStatus) -> MachineUsage:
        """The usage, of which this process is the service."""
        memory_bytes = own_memory_bytes()
        return cls(**vars(hardware), **vars(queue), service_pid=os.getpid(), service_memory_bytes=memory_bytes)
