"""GPUs of the machine, and CPU, memory and GPU usage of an attempt, sampled every few seconds.

The service appends samples to system.jsonl of the attempt; a gap means that no service was running.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

from palaestra.files.atomic import append_line
from palaestra.files.run_directory import Attempt
from palaestra.processes.procfs import ProcessIdentity, list_descendants
from palaestra.runs.state.attempt_files import read_tail
from palaestra.runs.wire import API_SCHEMA, JsonObject

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_NVIDIA_SMI = "nvidia-smi"
_CSV = "--format=csv,noheader,nounits"
_LIST_QUERY = (_NVIDIA_SMI, "--query-gpu=index,uuid,name,memory.total", _CSV)
_USAGE_QUERY = (_NVIDIA_SMI, "--query-gpu=index,utilization.gpu,memory.used", _CSV)
_MACHINE_QUERY = (_NVIDIA_SMI, "--query-gpu=index,name,memory.total,memory.used,utilization.gpu", _CSV)
_QUERY_TIMEOUT_S = 10.0
_TAIL_BYTES = 1 << 22
_Run: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]


@dataclass(frozen=True)
class ResourceSample:
    """Resource usage of all processes of an attempt at one moment."""

    __pydantic_config__ = API_SCHEMA

    time: float
    cpu_percent: float
    """Since the previous sample; 100 is one busy core."""
    rss_mb: float
    """Resident memory of all processes; shared pages count once per process."""
    processes: int
    gpus: tuple[tuple[str, float, float], ...] = ()
    """Index, utilisation in percent and memory in MB of every leased GPU."""


class ResourceSampler:
    """Samples the resource usage of one attempt."""

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

    def sample(self) -> ResourceSample | None:
        """Take and store a sample. None if the attempt has ended, and on the first call, which sets the baseline."""
        if not self._root.is_alive():
            return None
        now, before, earlier = self._monotonic(), self._ticks, self._at
        pids = {self._root.pid, *list_descendants(self._root.pid)}
        usage = {pid: use for pid in pids if (use := _read_usage(pid)) is not None}
        self._ticks, self._at = {pid: ticks for pid, (ticks, _) in usage.items()}, now
        if earlier is None or now <= earlier:
            return None
        # A new process has used all of its time since the last sample; the last share of an ended one is not counted.
        spent = sum(max(0, ticks - before.get(pid, 0)) for pid, ticks in self._ticks.items())
        sample = ResourceSample(
            time=self._clock(),
            cpu_percent=round(100 * spent / _TICKS / (now - earlier), 1),
            rss_mb=round(sum(pages for _, pages in usage.values()) * _PAGE / (1 << 20), 1),
            processes=len(usage),
            gpus=_read_gpu_usage(self._gpus) if self._gpus else (),
        )
        with contextlib.suppress(OSError):
            append_line(self._path, {"schema": 1, **asdict(sample)})
        return sample


def read_samples(attempt: Attempt, last: int | None = None) -> list[ResourceSample]:
    """The stored samples, oldest first; at most the `last` ones."""
    lines = read_tail(attempt.system, _TAIL_BYTES).split(b"\n")
    samples = [sample for line in lines if (sample := _parse_sample(line)) is not None]
    return samples if last is None else samples[-last:] if last else []


def read_peaks(attempt: Attempt) -> ResourceSample | None:
    """The maximum of every value over all stored samples; None without samples."""
    peaks: ResourceSample | None = None
    try:
        with open(attempt.system, "rb") as file:
            for line in file:
                sample = _parse_sample(line)
                if sample is not None:
                    peaks = sample if peaks is None else _maximum(peaks, sample)
    except OSError:
        pass
    return peaks


def _maximum(one: ResourceSample, other: ResourceSample) -> ResourceSample:
    gpus = {index: (busy, used) for index, busy, used in one.gpus}
    for index, busy, used in other.gpus:
        before = gpus.get(index, (0.0, 0.0))
        gpus[index] = (max(before[0], busy), max(before[1], used))
    return ResourceSample(
        max(one.time, other.time),
        max(one.cpu_percent, other.cpu_percent),
        max(one.rss_mb, other.rss_mb),
        max(one.processes, other.processes),
        tuple((index, busy, used) for index, (busy, used) in gpus.items()),
    )


def _parse_sample(line: bytes) -> ResourceSample | None:
    try:
        data: JsonObject = json.loads(line)
        gpus = tuple((str(index), float(busy), float(used)) for index, busy, used in data["gpus"])
        return ResourceSample(
            float(data["time"]), float(data["cpu_percent"]), float(data["rss_mb"]), int(data["processes"]), gpus
        )
    except (ValueError, KeyError, TypeError):
        return None


def _read_usage(pid: int) -> tuple[int, int] | None:
    """CPU time of a process in clock ticks, and its resident pages."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return int(fields[11]) + int(fields[12]), int(fields[21])
    except (OSError, IndexError, ValueError):
        return None


def _read_gpu_usage(gpus: tuple[str, ...]) -> tuple[tuple[str, float, float], ...]:
    usage = []
    for words in _query_gpus(_USAGE_QUERY):
        with contextlib.suppress(ValueError, IndexError):
            if words[0] in gpus:
                usage.append((words[0], float(words[1]), float(words[2])))
    return tuple(usage)


@dataclass(frozen=True)
class Gpu:
    """A GPU of the machine."""

    index: str
    """Its name in CUDA_VISIBLE_DEVICES."""
    uuid: str = ""
    name: str = ""
    memory_mb: int = 0


@dataclass(frozen=True)
class GpuUsage:
    """A GPU and how much of it is in use."""

    __pydantic_config__ = API_SCHEMA

    index: str
    """Its name in CUDA_VISIBLE_DEVICES."""
    name: str = ""
    memory_total_mb: int | None = None
    """Null until the driver has answered."""
    memory_used_mb: int | None = None
    busy_percent: float | None = None


def read_gpus(indices: Sequence[str], run: _Run = subprocess.run) -> tuple[GpuUsage, ...]:
    """The usage of these GPUs, of all programs together. Asks the driver, unless there are none."""
    usage = {index: GpuUsage(index) for index in indices}
    for words in _query_gpus(_MACHINE_QUERY, run) if indices else ():
        with contextlib.suppress(ValueError, IndexError):
            if words[0] in usage:
                total, used, busy = (float(word) for word in words[-3:])
                # The name of a GPU may contain commas.
                usage[words[0]] = GpuUsage(words[0], ",".join(words[1:-3]), int(total), int(used), busy)
    return tuple(usage.values())


def detect_gpus(run: _Run = subprocess.run, environment: Mapping[str, str] | None = None) -> tuple[Gpu, ...]:
    """The GPUs that can be leased; none without a driver. `PALAESTRA_GPUS=0,1` overrides the detection.

    GPUs hidden from the service by CUDA_VISIBLE_DEVICES are excluded.
    """
    environment = os.environ if environment is None else environment
    override = environment.get("PALAESTRA_GPUS")
    if override is not None:
        return tuple(Gpu(index.strip()) for index in override.split(",") if index.strip())
    # The name of a GPU may contain commas.
    gpus = tuple(
        Gpu(words[0], words[1], ",".join(words[2:-1]), int(words[-1]) if words[-1].isdecimal() else 0)
        for words in _query_gpus(_LIST_QUERY, run)
        if len(words) >= 4 and words[0].isdecimal()
    )
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return gpus if visible is None else tuple(_select_visible(gpus, visible))


def _select_visible(gpus: tuple[Gpu, ...], visible: str) -> Iterator[Gpu]:
    """The visible GPUs in order. Like CUDA, stop at the first name that matches none."""
    for word in (part.strip() for part in visible.split(",")):
        matches = [gpu for gpu in gpus if word == gpu.index or (word and gpu.uuid.startswith(word))]
        if word.startswith("MIG-"):
            # A slice of a GPU; the query does not list slices.
            matches = [Gpu(word)]
        if not matches:
            return
        yield matches[0]


def _query_gpus(command: tuple[str, ...], run: _Run = subprocess.run) -> list[list[str]]:
    """The rows that nvidia-smi prints; none if it fails."""
    try:
        done = run(command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    if done.returncode:
        return []
    return [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines()]
