"""The memory limit of this process, a check before large allocations, and reuse of freed memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from palaestra.errors import ConfigError

_CGROUPS = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_ALWAYS_FITS = 2**20
"""Sizes up to this are not checked, because reading the limit takes longer than allocating."""


def memory_limit(cgroups: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """The machine's memory in bytes, or the limit of this process' control group where that is lower."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        lines = own.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _limits_above(cgroups, path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits_above(cgroups / "memory", path, "memory.limit_in_bytes")
    return min(limits)


def memory_usage(
    cgroups: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup"), meminfo: Path = Path("/proc/meminfo")
) -> tuple[int, int]:
    """Memory in use and in total, in bytes: of the machine, or of this process' control group if that has a limit."""
    facts = {}
    for line in meminfo.read_text().splitlines():
        name, _, amount = line.partition(":")
        facts[name] = int(amount.split()[0]) * 1024 if amount.split() else 0
    machine, limit = facts.get("MemTotal", 0), memory_limit(cgroups, own)
    used = machine - facts.get("MemAvailable", 0)
    if limit >= machine:
        return used, machine
    try:
        group = cgroups / own.read_text().rpartition("::")[2].strip().lstrip("/")
        group = group if group.is_dir() else cgroups
        counters = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Like the machine's, without files that the kernel drops when memory is needed.
        used = int((group / "memory.current").read_text()) - int(counters.get("inactive_file", 0))
    except (OSError, ValueError):
        pass
    return min(used, limit), limit


@cache
def keep_freed_memory() -> None:
    """Let this process reuse large freed blocks (up to 64 MB each, 512 MB together) instead of returning them.

    Otherwise the activations of every minibatch are new pages, which the kernel clears one by one. Does nothing where
    the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 64 * 2**20)
        mallopt(_M_TRIM_THRESHOLD, 512 * 2**20)


def _limits_above(root: Path, path: str, name: str) -> list[int]:
    """Limits of a control group and of its parents; a container sees its own group as the root."""
    place = root / path.lstrip("/")
    limits = []
    for directory in {place, *place.parents} if place.is_dir() else {root}:
        if directory.is_relative_to(root):
            try:
                limits.append(int((directory / name).read_text()))
            except (OSError, ValueError):  # no such file, or "max"
                continue
    return limits


def format_bytes(count: int) -> str:
    """A number of bytes in readable units: 36.1 TB."""
    size, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB", "EB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.1f} {units[0]}" if units[0] != "B" else f"{count} B"


def check_fits_in_memory(
    place: str, value: object, parts: Mapping[str, int], remedy: str, *, limit: int | None = None
) -> None:
    """Raise a `ConfigError` about `place` if the `parts` (name to bytes) do not fit into memory together."""
    total = sum(parts.values())
    if limit is None and total <= _ALWAYS_FITS:
        return
    most = memory_limit() if limit is None else limit
    if total > most:
        sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        reason = f"it needs about {format_bytes(total)} of memory ({sizes}), but {format_bytes(most)} is available"
        raise ConfigError(place, value, reason, remedy)
