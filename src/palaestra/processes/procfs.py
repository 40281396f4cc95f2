"""Facts about processes, straight from the kernel: who lives, since when, below whom.

A pid alone names nobody for long; a pid, its start in clock ticks since boot and the boot's id do. Standard library
only and free to import, because programs that must cost next to nothing start with it. Linux.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "ProcessIdentity",
    "boot_id",
    "find_by_environment",
    "list_descendants",
    "list_pids",
    "read_stat",
    "start_ticks",
]


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of one boot of one machine; never another that inherited its number."""

    pid: int
    started: int
    """In clock ticks since boot, so that a change of the clock on the wall does not matter."""
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The identity of a living process; None when there is none, or only its zombie."""
        since = start_ticks(pid)
        return None if since is None else cls(pid, since, boot_id())

    @classmethod
    def from_json(cls, data: Any) -> ProcessIdentity | None:
        """From plain data as `asdict` gives it; None when it is not that."""
        try:
            return cls(int(data["pid"]), int(data["started"]), str(data["boot_id"]))
        except (KeyError, TypeError, ValueError):
            return None

    def is_alive(self) -> bool:
        """Whether this very process is still running."""
        return self.boot_id == boot_id() and start_ticks(self.pid) == self.started


def read_stat(pid: int) -> tuple[int, int] | None:
    """A process' parent and its start in clock ticks since boot; None when there is none, or it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may hold anything, parentheses and spaces included.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else (int(fields[1]), int(fields[19]))


def start_ticks(pid: int) -> int | None:
    """When a process started."""
    found = read_stat(pid)
    return None if found is None else found[1]


def boot_id() -> str:
    """Which boot of this machine it is; empty where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def list_pids() -> Iterator[int]:
    """Every process there is."""
    with contextlib.suppress(OSError):
        yield from (int(name) for name in os.listdir("/proc") if name.isdigit())


def list_descendants(*roots: int) -> set[int]:
    """Every living descendant of these processes."""
    children: dict[int, list[int]] = {}
    for pid in list_pids():
        found = read_stat(pid)
        if found is not None:
            children.setdefault(found[0], []).append(pid)
    reached: set[int] = set()
    frontier = list(roots)
    while frontier:
        for child in children.get(frontier.pop(), []):
            if child not in reached:
                reached.add(child)
                frontier.append(child)
    return reached


def find_by_environment(name: str, value: str) -> set[int]:
    """Our own processes that were started with this environment variable, whoever their parents are by now."""
    mark, found = f"{name}={value}".encode(), set()
    for pid in list_pids():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if os.fstat(file.fileno()).st_uid == os.getuid() and mark in file.read().split(b"\0"):
                found.add(pid)
    return {pid for pid in found if read_stat(pid) is not None}
