"""Facts about the machine and the moment, without which a number of steps per second means nothing."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["facts", "load"]

_PACKAGES = ("torch", "numpy", "numba", "scipy", "gymnasium", "mujoco", "box2d", "tensordict")


def facts() -> dict[str, Any]:
    """Processor, cores, versions, date."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "date": datetime.date.today().isoformat(),
        "load_at_start": load(),
    }


def load() -> float:
    """Load average of the last minute; above 0.3 before a run, other processes disturb the timings."""
    return round(os.getloadavg()[0], 2)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
