"""The queue of runs: which run starts next on which machine and GPUs, why the others wait, and the file that says so.

The scheduling functions are pure. The queue file can be lost without harm: then queued runs are listed without a
reason, and the service does not drain.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, TypeAlias

from palaestra.files.atomic import read_json, write_json
from palaestra.files.home import Home
from palaestra.processes.procfs import ProcessIdentity
from palaestra.runs.record import HERE, RunRecord
from palaestra.runs.wire import API_SCHEMA, JsonObject

_NO_SERVICE = "waits for a service; palaestra serve starts one"
Gpus: TypeAlias = tuple[str, ...]
"""Indices of the GPUs leased to a run."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Slots:
    """What the runs of one machine share: the number of concurrent runs, and the GPUs."""

    max_running: int
    gpus: Gpus = ()
    problem: str = ""
    """Why no run can be launched there now; empty when one can."""


class Lease(NamedTuple):
    """What a run occupies: a slot of a machine, and GPUs of it."""

    gpus: Gpus = ()
    machine: str = HERE


@dataclass(frozen=True)
class QueuedRun:
    """A run that waits to be launched."""

    run_id: str
    priority: int = 0
    since: float = 0.0
    gpus: int = 0
    machines: tuple[str, ...] = (HERE,)
    """Where it may be launched, in order of preference."""


@dataclass(frozen=True)
class WaitingRun:
    """A queued run, and what it waits for."""

    __pydantic_config__ = API_SCHEMA

    run_id: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class QueueStatus:
    """What runs and what waits."""

    __pydantic_config__ = API_SCHEMA

    slots: int
    """Maximum number of concurrent runs."""
    running: int
    """Runs that occupy a slot."""
    num_queued: int
    queued: tuple[WaitingRun, ...]
    """The first of them, in the order in which they start."""
    draining: bool
    """Whether no queued run is started."""


class _Free:
    """What is left of one machine while launches are decided."""

    def __init__(self, slots: Slots, leases: Iterable[Lease]) -> None:
        self.slots, self.used = slots, 0
        self.gpus = list(slots.gpus)
        for lease in leases:
            self.used += 1
            self.gpus = [gpu for gpu in self.gpus if gpu not in lease.gpus]
        self.reserved = False

    @property
    def is_full(self) -> bool:
        return self.used >= self.slots.max_running or bool(self.slots.problem)

    def take(self, gpus: int) -> Gpus:
        leased, self.gpus = tuple(self.gpus[:gpus]), self.gpus[gpus:]
        self.used += 1
        return leased


def next_launches(
    queued: Sequence[QueuedRun], running: Mapping[str, Lease], machines: Mapping[str, Slots], draining: bool = False
) -> dict[str, Lease]:
    """The runs to launch now and what they lease: highest priority first, then first come, first served.

    Runs without GPUs may overtake one that waits for GPUs. Runs with GPUs may not: it could wait forever.
    """
    return {} if draining else _assign(queued, running, machines)[0]


def _assign(
    queued: Sequence[QueuedRun], running: Mapping[str, Lease], machines: Mapping[str, Slots]
) -> tuple[dict[str, Lease], dict[str, _Free]]:
    free = {
        name: _Free(slots, [lease for lease in running.values() if lease.machine == name])
        for name, slots in machines.items()
    }
    launches: dict[str, Lease] = {}
    for run in sort_queue(queued):
        known = [name for name in run.machines if name in free]
        place = next((name for name in known if not free[name].is_full and _fits(run.gpus, free[name])), None)
        if place is not None:
            launches[run.run_id] = Lease(free[place].take(run.gpus), place)
            continue
        waits_for_gpus = [name for name in known if not free[name].is_full]
        if waits_for_gpus:
            # Reserve the free GPUs of the machine that it prefers.
            free[waits_for_gpus[0]].reserved = True
    return launches, free


def _fits(gpus: int, free: _Free) -> bool:
    return gpus == 0 or (gpus <= len(free.gpus) and not free.reserved)


def sort_queue(queued: Iterable[QueuedRun]) -> list[QueuedRun]:
    """Highest priority first, then first come, first served."""
    return sorted(queued, key=lambda run: (-run.priority, run.since, run.run_id))


def waiting_reasons(
    queued: Sequence[QueuedRun], running: Mapping[str, Lease], machines: Mapping[str, Slots], draining: bool = False
) -> dict[str, str]:
    """What each run that is not launched now waits for, by run id."""
    if draining:
        return {run.run_id: "the service is draining: palaestra runs drain --off" for run in queued}
    launches, free = _assign(queued, running, machines)
    reasons = {}
    for run in queued:
        if run.run_id in launches:
            continue
        texts = [_waiting_reason(run, name, free[name]) for name in run.machines if name in free]
        reasons[run.run_id] = "; ".join(texts) or "waits for a machine"
    return reasons


def _waiting_reason(run: QueuedRun, machine: str, free: _Free) -> str:
    slots, place = free.slots, f" on {machine}" if machine else ""
    if slots.problem:
        return f"waits for {machine or 'this machine'}: {slots.problem}"
    if free.used >= slots.max_running:
        return f"waits for a slot{place} ({free.used} of {slots.max_running} in use)"
    reserved = ", kept for a run before it" if len(free.gpus) >= run.gpus else ""
    wanted = f"{run.gpus} GPU{'s' if run.gpus > 1 else ''}"
    return f"waits for {wanted}{place} ({len(free.gpus)} of {len(slots.gpus)} free{reserved})"


def gpu_shortage(gpus: int, slots: Slots, machine: str = HERE) -> str:
    """Why a run that needs this many GPUs would wait forever; empty if it would not."""
    if gpus <= len(slots.gpus):
        return ""
    have = "none" if not slots.gpus else str(len(slots.gpus))
    return f"needs {gpus} GPU{'s' if gpus > 1 else ''} and {machine or 'this machine'} has {have}"


def waiting_reason(row: RunRecord, why: str) -> str:
    """The reason of a queued run: its recorded reason, if any, and what it waits for."""
    return "; ".join(text for text in (row.reason, why) if text)


class QueueFile:
    """`service/queue.json`: why runs wait, and whether the service drains. One process writes, any may read."""

    def __init__(self, home: Home) -> None:
        self._path = home.service / "queue.json"
        self._written: JsonObject | None = None
        self._version: tuple[int, int] | None = None
        self._content: JsonObject = {}

    def write(self, draining: bool, reasons: Mapping[str, str]) -> None:
        """Write the file if its content has changed."""
        # Thousands of runs may wait for the same thing: store the most common reason once.
        most_common = Counter(reasons.values()).most_common(1)
        default = most_common[0][0] if most_common else ""
        others = {run_id: reason for run_id, reason in reasons.items() if reason != default}
        content = {"schema": 1, "draining": draining, "reason": default, "reasons": others}
        if content == self._written:
            return
        writer = ProcessIdentity.of(os.getpid())
        try:
            self._path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
            write_json(self._path, {**content, "by": asdict(writer) if writer else None}, durable=False)
        except OSError as error:
            _log.warning("%s cannot be written: %s", self._path, error)
            return
        self._written = content

    def is_draining(self) -> bool:
        """Whether the last service that wrote the file was draining."""
        return (read_json(self._path) or {}).get("draining") is True

    def reason(self, run_id: str) -> str:
        """Why a run waits; empty if the service has not recorded it."""
        try:
            stat = os.stat(self._path)
        except OSError:
            return _NO_SERVICE
        version = (stat.st_ino, stat.st_mtime_ns)
        if version != self._version:
            self._content, self._version = read_json(self._path) or {}, version
        writer = ProcessIdentity.from_json(self._content.get("by"))
        if writer is None or not writer.is_alive():
            return _NO_SERVICE
        reasons = self._content.get("reasons")
        own = reasons.get(run_id) if isinstance(reasons, dict) else None
        return str(own or self._content.get("reason") or "")
