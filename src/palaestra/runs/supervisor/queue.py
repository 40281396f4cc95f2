"""Who starts next: priorities, a limit on how many run at once, and GPUs that belong to one run at a time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Launch", "Running", "Slots", "Waiting", "never_fits", "next_launches", "why_waiting"]


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


def why_waiting(
    waiting: Sequence[Waiting], running: Sequence[Running], slots: Slots, draining: bool = False
) -> dict[str, str]:
    """Of every run that does not start now, what it waits for."""
    if draining:
        return {run.run_id: "the service is draining: palaestra runs drain --off" for run in waiting}
    launches = next_launches(waiting, running, slots)
    starting = {launch.run_id for launch in launches}
    taken = len(running) + len(launches)
    leased = sum(len(run.gpus) for run in running) + sum(len(launch.gpus) for launch in launches)
    free = len(slots.gpus) - leased
    reasons = {}
    for run in waiting:
        if run.run_id in starting:
            continue
        if taken >= slots.max_running:
            reasons[run.run_id] = f"waits for a slot ({taken} of {slots.max_running} in use)"
        else:
            kept = ", kept for a run before it" if free >= run.gpus else ""
            wanted = f"{run.gpus} GPU{'s' if run.gpus > 1 else ''}"
            reasons[run.run_id] = f"waits for {wanted} ({free} of {len(slots.gpus)} free{kept})"
    return reasons


def never_fits(gpus: int, slots: Slots) -> str:
    """Why a run that needs so many GPUs would wait for ever; empty when it would not."""
    if gpus <= len(slots.gpus):
        return ""
    have = "none" if not slots.gpus else str(len(slots.gpus))
    return f"needs {gpus} GPU{'s' if gpus > 1 else ''} and this machine has {have}"
