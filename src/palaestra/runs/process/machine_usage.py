"""Usage of the machine: processor, memory, disk and GPUs, sampled in the background while clients ask for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from palaestra.files.home import Home
from palaestra.processes.memory import memory_usage
from palaestra.runs.process.resource_usage import GpuUsage, read_gpus
from palaestra.runs.wire import API_SCHEMA

_EVERY_S = 1.0
_IDLE_AFTER_S = 5.0
"""Sampling stops after this time without a request."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_IDLE_COLUMNS = (3, 4)
"""Idle, and waiting for a disk, among the times of a processor in /proc/stat."""
_TIMES = 8
"""The times after these are counted among the first ones, too."""


@dataclass(frozen=True, kw_only=True)
class HardwareUsage:
    """Usage of the machine at one moment."""

    __pydantic_config__ = API_SCHEMA

    time: float
    cpu_percent: float
    """Of all cores together, since the previous sample; 100 is a machine without idle time."""
    core_percent: tuple[float, ...]
    """The same for every core."""
    memory_used_bytes: int
    memory_total_bytes: int
    """Memory of the machine, or the limit of the service's control group where that is lower."""
    disk_free_bytes: int
    """On the disk of the state directory."""
    disk_total_bytes: int
    gpus: tuple[GpuUsage, ...]
    """GPUs that runs can lease."""


class CpuTimes(NamedTuple):
    """Busy and total time of a processor in clock ticks."""

    busy: int
    total: int


class MachineMonitor:
    """Samples the machine once a second while `usage` is called. Use from one event loop."""

    def __init__(
        self,
        home: Home,
        gpus: Callable[[], Sequence[str]],
        closing: asyncio.Event,
        *,
        every_s: float = _EVERY_S,
        idle_after_s: float = _IDLE_AFTER_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._home, self._gpus, self._closing = home, gpus, closing
        self._every_s, self._idle_after_s, self._monotonic = every_s, idle_after_s, monotonic
        # The first sample is about the time since the start of the service.
        self._times = read_cpu_times()
        self._latest: HardwareUsage | None = None
        self._requested = 0.0
        self._sampling: asyncio.Task[None] | None = None

    @property
    def is_sampling(self) -> bool:
        """Whether samples are being taken in the background."""
        return self._sampling is not None and not self._sampling.done()

    async def usage(self) -> HardwareUsage:
        """The latest sample; after a pause, one that is taken now and is about the time of the pause."""
        self._requested = self._monotonic()
        if self._latest is None or not self.is_sampling:
            self._latest = await asyncio.to_thread(self._sample)
            if not self.is_sampling and not self._closing.is_set():
                self._sampling = asyncio.create_task(self._sample_while_requested())
        return self._latest

    async def _sample_while_requested(self) -> None:
        while not self._closing.is_set() and self._monotonic() - self._requested < self._idle_after_s:
            # Asks the driver, which may take seconds; a request does not wait for it.
            gpus = await asyncio.to_thread(read_gpus, tuple(self._gpus()))
            self._latest = replace(await asyncio.to_thread(self._sample), gpus=gpus)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._closing.wait()

    def _sample(self) -> HardwareUsage:
        before, self._times = self._times, read_cpu_times()
        shares = [_share(old, new) for old, new in zip(before, self._times, strict=False)]
        used, total = memory_usage()
        disk = _disk_usage(self._home.path)
        known = self._latest.gpus if self._latest is not None else tuple(map(GpuUsage, self._gpus()))
        return HardwareUsage(
            time=time.time(),
            cpu_percent=shares[0] if shares else 0.0,
            core_percent=tuple(shares[1:]),
            memory_used_bytes=used,
            memory_total_bytes=total,
            disk_free_bytes=disk.free,
            disk_total_bytes=disk.total,
            gpus=known,
        )


def read_cpu_times(path: Path = Path("/proc/stat")) -> list[CpuTimes]:
    """The times of all cores together, then of every core; empty if the kernel does not tell."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    times = []
    for words in (line.split() for line in lines if line.startswith("cpu")):
        ticks = [int(word) for word in words[1 : 1 + _TIMES]]
        times.append(CpuTimes(sum(ticks) - sum(ticks[column] for column in _IDLE_COLUMNS), sum(ticks)))
    return times


def own_memory_bytes() -> int:
    """Resident memory of this process."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def _share(before: CpuTimes, after: CpuTimes) -> float:
    elapsed = after.total - before.total
    # A counter of the kernel may go back by a tick.
    return round(min(100.0, max(0.0, 100.0 * (after.busy - before.busy) / elapsed)), 1) if elapsed > 0 else 0.0


def _disk_usage(path: Path) -> shutil._ntuple_diskusage:
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path)
