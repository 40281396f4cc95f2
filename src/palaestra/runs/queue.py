"""Who starts next: priorities, a limit on how many run at once, and GPUs that belong to one run at a time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Launch", "Running", "Slots", "Waiting", "never_fits", "next_launches"]


@dataclass(frozen=True)
class Slots:
    """What there is to share out."""

    max_running: int
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Waiting:
    """A run in the queue."""

    run_id: str
    priority: int = 0
    since: float = 0.0
    gpus: int = 0


@dataclass(frozen=True)
class Running:
    """A run that takes a slot, and the GPUs it has for itself."""

    run_id: str
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """A run to start now, on these GPUs."""

    run_id: str
    gpus: tuple[str, ...] = ()


def next_launches(
    waiting: Sequence[Waiting], running: Sequence[Running], slots: Slots, draining: bool = False
) -> list[Launch]:
    """Which runs start now: highest priority first, then who came first.

    Runs without GPUs go past one that waits for some. Others do not: it would wait for ever behind small ones.
    """
    if draining:
        return []
    room = slots.max_running - len(running)
    taken = {gpu for run in running for gpu in run.gpus}
    free = [gpu for gpu in slots.gpus if gpu not in taken]
    launches: list[Launch] = []
    for run in sorted(waiting, key=lambda one: (-one.priority, one.since, one.run_id)):
        if len(launches) >= room:
            break
        if run.gpus > len(free):
            # Whatever is free is kept together for this one.
            free = []
            continue
        launches.append(Launch(run.run_id, tuple(free[: run.gpus])))
        free = free[run.gpus :]
    return launches


def never_fits(gpus: int, slots: Slots) -> str:
    """Why a run that needs so many GPUs would wait for ever; empty when it would not."""
    if gpus <= len(slots.gpus):
        return ""
    have = "none" if not slots.gpus else str(len(slots.gpus))
    return f"needs {gpus} GPU{'s' if gpus > 1 else ''} and this machine has {have}"
