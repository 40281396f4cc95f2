"""Process identity, start time and descendants from /proc.

A pid can be reused; a pid with its start time and the boot id identifies a process. Standard library only, because
small helper processes import it. Linux only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Identifies one process, even if its pid is reused later."""

    pid: int
    started: int
    """Start time in clock ticks since boot, which does not depend on the system clock."""
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """The identity of a running process; None if it does not exist or is a zombie."""
        ticks = start_ticks(pid)
        return None if ticks is None else cls(pid, ticks, boot_id())

    @classmethod
    def from_json(cls, data: Any) -> ProcessIdentity | None:
        """Read the data of `asdict`; None if it is invalid."""
        try:
            return cls(int(data["pid"]), int(data["started"]), str(data["boot_id"]))
        except (KeyError, TypeError, ValueError):
            return None

    def is_alive(self) -> bool:
        """Whether this process is still running."""
        return self.boot_id == boot_id() and start_ticks(self.pid) == self.started


class ProcessStat(NamedTuple):
    """Parent pid, process group, and start time in clock ticks since boot."""

    parent: int
    group: int
    started: int


def read_stat(pid: int) -> ProcessStat | None:
    """The state of a process; None if it does not exist or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may contain parentheses and spaces.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else ProcessStat(int(fields[1]), int(fields[2]), int(fields[19]))


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if it does not exist or is a zombie."""
    stat = read_stat(pid)
    return None if stat is None else stat.started


def boot_id() -> str:
    """Id of the current boot of the machine; empty if the kernel does not provide it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def list_pids() -> Iterator[int]:
    """The pids of all processes."""
    with contextlib.suppress(OSError):
        yield from (int(name) for name in os.listdir("/proc") if name.isdigit())


def list_descendants(*roots: int) -> set[int]:
    """The pids of all running descendants of these processes."""
    children: dict[int, list[int]] = {}
    for pid in list_pids():
        stat = read_stat(pid)
        if stat is not None:
            children.setdefault(stat.parent, []).append(pid)
    reached: set[int] = set()
    frontier = list(roots)
    while frontier:
        for child in children.get(frontier.pop(), []):
            if child not in reached:
                reached.add(child)
                frontier.append(child)
    return reached


def read_variable(pid: int, name: str) -> str | None:
    """The value of an environment variable that one of our processes was started with; None if it has none."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = os.fsdecode(file.read()).split("\0") if os.fstat(file.fileno()).st_uid == os.getuid() else []
    except OSError:
        return None
    return next((variable.removeprefix(f"{name}=") for variable in variables if variable.startswith(f"{name}=")), None)


def find_by_environment(name: str, *values: str) -> set[int]:
    """The pids of our running processes that were started with one of these values of an environment variable."""
    return {pid for pid in list_pids() if read_variable(pid, name) in values and read_stat(pid) is not None}
