"""Order of the runs: every contender is a separate process, round robin, so that a slow minute affects all of them.

Two lanes. "one core": pinned to a single core with one thread. "two cores": free to use two; there SB3 runs with one
and with two torch threads, ours too where the network is large enough to gain by it, and the better result counts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.workloads import Workload

__all__ = ["LANES", "Bench", "Entry", "can_pin"]

LANES = ("one core", "two cores")
_TIMEOUT_S = 300.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


@dataclass(frozen=True)
class Entry:
    """One contender on one workload in one lane."""

    contender: str
    lane: str
    variant: str = ""
    threads: int = 1

    @property
    def label(self) -> str:
        """How it is called in the tables."""
        name = f"{self.contender} ({self.variant})" if self.variant else self.contender
        return f"{name}, {self.threads} threads" if self.threads > 1 else name


@dataclass
class Bench:
    """Runs children and keeps what they printed."""

    root: Path
    rivals_python: Path
    missing: dict[str, str]
    rounds: int
    seconds: float
    lanes: tuple[str, ...]
    quick: bool
    say: Callable[[str], None]
    results: list[dict[str, Any]] = field(default_factory=list)

    def workload(self, w: Workload) -> None:
        """Cold run of ours, then all rounds."""
        with tempfile.TemporaryDirectory(prefix="palaestra-bench-") as scratch:
            first = Entry("ours", self.lanes[0])
            # An empty cache: this run compiles, and leaves the kernels behind for the others.
            self._keep(w, first, self._child(w, first, Path(scratch), seconds=0.1), round_number=0, cold=True)
            for round_number in range(1, self.rounds + 1):
                for entry in self._entries(w, with_env_only=round_number == 1):
                    line = self._child(w, entry, Path(scratch), seconds=self.seconds)
                    self._keep(w, entry, line, round_number=round_number)

    def _entries(self, w: Workload, *, with_env_only: bool) -> Iterator[Entry]:
        for lane in self.lanes:
            yield Entry("ours", lane)
            if w.kind == "cnn" and lane == "two cores":
                yield Entry("ours", lane, threads=2)
            if w.kind == "cnn":
                yield Entry("ours", lane, "bfloat16")
            if w.name == "cartpole":
                yield Entry("ours", lane, "global")
            for rival in w.rivals:
                # A smoke run only checks that every contender runs, so once is enough.
                if rival not in self.missing and (rival == "sb3" or lane == self.lanes[0] or not self.quick):
                    yield Entry(rival, lane)
                if rival == "sb3" and lane == "two cores" and rival not in self.missing:
                    yield Entry(rival, lane, threads=2)
        if with_env_only:
            yield Entry("env_only", self.lanes[0], "raw")
            yield Entry("env_only", self.lanes[0], "sync")

    def _keep(self, w: Workload, entry: Entry, line: dict[str, Any], *, round_number: int, cold: bool = False) -> None:
        line |= {"workload": w.name, "contender": entry.contender, "label": entry.label, "lane": entry.lane}
        line |= {"threads": entry.threads, "variant": entry.variant, "round": round_number, "cold": cold}
        self.results.append(line)
        speed = line.get("steps_per_second")
        what = f"{speed:>12,.0f} steps/s" if speed else f"  {line.get('skipped') or line.get('failed')}"
        self.say(f"{w.name:<12} {entry.lane:<10} {entry.label:<20} {'cold' if cold else ''}{what}")

    def _child(self, w: Workload, entry: Entry, scratch: Path, *, seconds: float) -> dict[str, Any]:
        ours = entry.contender in ("ours", "env_only")
        command = [str(sys.executable if ours else self.rivals_python)]
        command += ["-m", f"benchmarks.contenders.{entry.contender}", w.name, "--seconds", str(seconds)]
        command += ["--threads", str(entry.threads), "--variant", entry.variant]
        command += ["--started", repr(time.perf_counter())]
        return self.run(command, scratch, pinned=entry.lane == "one core", threads=entry.threads)

    def run(self, command: list[str], scratch: Path, *, pinned: bool, threads: int = 1) -> dict[str, Any]:
        """Run one child and return its last line of JSON, or `{"failed": reason}`."""
        if pinned:
            command = ["taskset", "-c", "0", *command]
        # The scratch directory is where simulators leave their logs.
        environment = os.environ | dict.fromkeys(_THREAD_VARIABLES, str(threads))
        environment |= {"XDG_CACHE_HOME": str(scratch), "PYTHONPATH": str(self.root), "PYTHONWARNINGS": "ignore"}
        # XLA has its own thread pools, which the pinned lane confines to one core.
        environment |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"}
        try:
            done = subprocess.run(
                command, cwd=scratch, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"took longer than {_TIMEOUT_S:.0f} s"}
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            said = done.stderr.strip().splitlines()
            return {"failed": said[-1][:200] if said else f"ended with code {done.returncode} and said nothing"}
        return dict(json.loads(lines[-1]))

    def memory(self) -> list[dict[str, Any]]:
        """Resident memory of a rollout, ours and SB3's."""
        found = []
        with tempfile.TemporaryDirectory(prefix="palaestra-bench-") as scratch:
            for variant, python in (("ours", sys.executable), ("sb3", str(self.rivals_python))):
                if variant in self.missing:
                    continue
                command = [python, "-m", "benchmarks.contenders.memory", "--variant", variant]
                found.append({"contender": variant} | self.run(command, Path(scratch), pinned=False))
        return found

    def command_line(self) -> dict[str, Any]:
        """Wall time of `palaestra --help`, best of the rounds."""
        program = Path(sys.executable).with_name("palaestra")
        if not program.exists():
            return {"skipped": "the palaestra command is not installed"}
        times = []
        for _ in range(self.rounds):
            began = time.perf_counter()
            done = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=60, check=False)
            times.append(time.perf_counter() - began)
            if done.returncode:
                said = done.stderr.strip().splitlines()
                return {"skipped": said[-1][:200] if said else f"ended with code {done.returncode}"}
        return {"help_seconds": round(min(times), 3)}


def can_pin() -> bool:
    """Whether this system can confine a process to a core."""
    return shutil.which("taskset") is not None and hasattr(os, "sched_getaffinity") and 0 in os.sched_getaffinity(0)
