"""The queue of runs: which run starts next on which GPUs, why the others wait, and the file that says so.

The scheduling functions are pure. The queue file can be lost without harm: then queued runs are listed without a
reason, and the service does not drain.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

from palaestra.files.atomic import read_json, write_json
from palaestra.files.home import Home
from palaestra.processes.procfs import ProcessIdentity
from palaestra.runs.record import RunRecord
from palaestra.runs.wire import API_SCHEMA, JsonObject

_NO_SERVICE = "waits for a service; palaestra serve starts one"
Gpus: TypeAlias = tuple[str, ...]
"""Indices of the GPUs leased to a run."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Slots:
    """What the runs share: the number of concurrent runs, and the GPUs."""

    max_running: int
    gpus: Gpus = ()


@dataclass(frozen=True)
class QueuedRun:
    """A run that waits to be launched."""

    run_id: str
    priority: int = 0
    since: float = 0.0
    gpus: int = 0


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


def next_launches(
    queued: Sequence[QueuedRun], running: Mapping[str, Gpus], slots: Slots, draining: bool = False
) -> dict[str, Gpus]:
    """The runs to launch now and their GPUs: highest priority first, then first come, first served.

    Runs without GPUs may overtake one that waits for GPUs. Runs with GPUs may not: it could wait forever.
    """
    launches: dict[str, Gpus] = {}
    if draining:
        return launches
    leased = {gpu for gpus in running.values() for gpu in gpus}
    free = [gpu for gpu in slots.gpus if gpu not in leased]
    for run in sort_queue(queued):
        if len(running) + len(launches) >= slots.max_running:
            break
        if run.gpus > len(free):
            # Reserve the free GPUs for this run.
            free = []
            continue
        launches[run.run_id] = tuple(free[: run.gpus])
        free = free[run.gpus :]
    return launches


def sort_queue(queued: Iterable[QueuedRun]) -> list[QueuedRun]:
    """Highest priority first, then first come, first served."""
    return sorted(queued, key=lambda run: (-run.priority, run.since, run.run_id))


def waiting_reasons(
    queued: Sequence[QueuedRun], running: Mapping[str, Gpus], slots: Slots, draining: bool = False
) -> dict[str, str]:
    """What each run that is not launched now waits for, by run id."""
    if draining:
        return {run.run_id: "the service is draining: palaestra runs drain --off" for run in queued}
    leases = {**running, **next_launches(queued, running, slots)}
    free = len(slots.gpus) - sum(map(len, leases.values()))
    reasons = {}
    for run in queued:
        if run.run_id in leases:
            continue
        if len(leases) >= slots.max_running:
            reasons[run.run_id] = f"waits for a slot ({len(leases)} of {slots.max_running} in use)"
        else:
            reserved = ", kept for a run before it" if free >= run.gpus else ""
            wanted = f"{run.gpus} GPU{'s' if run.gpus > 1 else ''}"
            reasons[run.run_id] = f"waits for {wanted} ({free} of {len(slots.gpus)} free{reserved})"
    return reasons


def gpu_shortage(gpus: int, slots: Slots) -> str:
    """Why a run that needs this many GPUs would wait forever; empty if it would not."""
    if gpus <= len(slots.gpus):
        return ""
    have = "none" if not slots.gpus else str(len(slots.gpus))
    return f"needs {gpus} GPU{'s' if gpus > 1 else ''} and this machine has {have}"


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
