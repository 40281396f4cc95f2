"""What an attempt takes of its machine: processor, memory and GPUs of its whole process tree, every few seconds.

Written to system.jsonl of the attempt by the service while it looks; a gap means that no service looked.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from palaestra.files.atomic import append_line
from palaestra.files.run_directory import Attempt
from palaestra.processes.procfs import ProcessIdentity, list_descendants

__all__ = ["Peaks", "Sample", "Sampler", "read_peaks", "read_samples"]

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_GPU_QUERY = ("nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits")
_TAIL_BYTES = 1 << 22


@dataclass(frozen=True)
class Sample:
    """One look."""

    time: float
    cpu_percent: float
    """100 is one core, busy since the look before."""
    rss_mb: float
    """Resident memory of all its processes; pages they share count once for each."""
    processes: int
    gpus: tuple[tuple[str, float, float], ...] = ()
    """Index, utilisation in percent and memory in MB of every GPU it has leased."""


@dataclass(frozen=True)
class Peaks:
    """The most that an attempt took at any look."""

    cpu_percent: float
    rss_mb: float
    processes: int
    gpus: tuple[tuple[str, float, float], ...] = ()


class Sampler:
    """Looks at one attempt again and again."""

    def __init__(
        self,
        attempt: Attempt,
        root: ProcessIdentity,
        gpus: tuple[str, ...] = (),
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._root, self._gpus = attempt.system, root, gpus
        self._clock, self._monotonic = clock, monotonic
        self._ticks: dict[int, int] = {}
        self._at: float | None = None

    def take(self) -> Sample | None:
        """Look, and write it down; None when nothing of it lives, or on the first look, which has no before."""
        if not self._root.is_alive():
            return None
        now, before, earlier = self._monotonic(), self._ticks, self._at
        found = {
            pid: use for pid in {self._root.pid, *list_descendants(self._root.pid)} if (use := _use(pid)) is not None
        }
        self._ticks, self._at = {pid: ticks for pid, (ticks, _) in found.items()}, now
        if earlier is None or now <= earlier:
            return None
        # A process that is new has used all of its time since; one that is gone took its last share with it.
        spent = sum(max(0, ticks - before.get(pid, 0)) for pid, ticks in self._ticks.items())
        sample = Sample(
            time=self._clock(),
            cpu_percent=round(100 * spent / _TICKS / (now - earlier), 1),
            rss_mb=round(sum(pages for _, pages in found.values()) * _PAGE / (1 << 20), 1),
            processes=len(found),
            gpus=_gpu_use(self._gpus) if self._gpus else (),
        )
        with contextlib.suppress(OSError):
            append_line(self._path, {"schema": 1, **asdict(sample)})
        return sample


def read_samples(attempt: Attempt, last: int | None = None) -> list[Sample]:
    """What was written down, oldest first; at most the `last` so many."""
    try:
        with open(attempt.system, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    found = [sample for line in lines if (sample := _read(line)) is not None]
    return found if last is None else found[-last:] if last else []


def read_peaks(attempt: Attempt) -> Peaks | None:
    """The greatest of everything that was written down; None when nothing was."""
    peaks: Peaks | None = None
    try:
        with open(attempt.system, "rb") as file:
            for line in file:
                sample = _read(line)
                if sample is not None:
                    peaks = _greater(peaks, sample)
    except OSError:
        pass
    return peaks


def _greater(peaks: Peaks | None, sample: Sample) -> Peaks:
    if peaks is None:
        return Peaks(sample.cpu_percent, sample.rss_mb, sample.processes, sample.gpus)
    gpus = {index: (busy, used) for index, busy, used in peaks.gpus}
    for index, busy, used in sample.gpus:
        before = gpus.get(index, (0.0, 0.0))
        gpus[index] = (max(before[0], busy), max(before[1], used))
    return Peaks(
        max(peaks.cpu_percent, sample.cpu_percent),
        max(peaks.rss_mb, sample.rss_mb),
        max(peaks.processes, sample.processes),
        tuple((index, busy, used) for index, (busy, used) in gpus.items()),
    )


def _read(line: bytes) -> Sample | None:
    try:
        data: dict[str, Any] = json.loads(line)
        gpus = tuple((str(index), float(busy), float(used)) for index, busy, used in data["gpus"])
        return Sample(
            float(data["time"]), float(data["cpu_percent"]), float(data["rss_mb"]), int(data["processes"]), gpus
        )
    except (ValueError, KeyError, TypeError):
        return None


def _use(pid: int) -> tuple[int, int] | None:
    """Clock ticks that a process has used, and pages it holds."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return int(fields[11]) + int(fields[12]), int(fields[21])
    except (OSError, IndexError, ValueError):
        return None


def _gpu_use(gpus: tuple[str, ...]) -> tuple[tuple[str, float, float], ...]:
    try:
        done = subprocess.run(_GPU_QUERY, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ()
    found = []
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        words = [word.strip() for word in line.split(",")]
        with contextlib.suppress(ValueError, IndexError):
            if words[0] in gpus:
                found.append((words[0], float(words[1]), float(words[2])))
    return tuple(found)
