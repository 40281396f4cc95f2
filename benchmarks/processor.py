"""Who used the processor meanwhile: browsers below this process, everything else below it, and strangers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from palaestra.processes.procfs import list_descendants

__all__ = ["ProcessorTime", "Used"]

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Used:
    """Seconds of processor."""

    browsers: float
    ours: float
    others: float


class ProcessorTime:
    """A meter that is read once, while everything that counts still runs."""

    def __init__(self) -> None:
        self._before, self._busy = _own(), _busy_s()

    def read(self) -> Used:
        now, busy = _own(), _busy_s() - self._busy
        spent = {"browsers": 0.0, "ours": 0.0}
        for pid, (kind, seconds) in now.items():
            spent[kind] += seconds - self._before.get(pid, (kind, 0.0))[1]
        return Used(spent["browsers"], spent["ours"], max(0.0, busy - sum(spent.values())))


def _own() -> dict[int, tuple[str, float]]:
    found = {}
    for pid in (os.getpid(), *list_descendants(os.getpid())):
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        except OSError:
            continue
        fields = rest.split()
        kind = "browsers" if "chrom" in name or "headless" in name else "ours"
        found[pid] = (kind, (int(fields[11]) + int(fields[12])) * _TICK_S)
    return found


def _busy_s() -> float:
    """Seconds in which any core of the machine worked."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _, _, irq, softirq = fields[:7]
    return (user + nice + system + irq + softirq) * _TICK_S
