"""The stopwatch every contender uses, and the one line of JSON it prints.

An iteration is one collection and one learning phase. The first one is set apart: it holds compilation, allocation
and warming up. Speed is steps over the wall time of all later iterations, until `seconds` have passed. The moment the
process was started comes from the parent (the monotonic clock is common to all processes), so that importing counts.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.workloads import WORKLOADS, Workload

__all__ = ["Meter", "Skip", "run_contender"]

_MOST_ITERATIONS = 1_000_000


class Skip(Exception):
    """This contender cannot run this workload; the text says why."""


class Meter:
    """Counts wall and processor time per phase. `begin("collect")`, `begin("learn")`, `done(steps)`, repeat."""

    def __init__(self, started: float, seconds: float) -> None:
        self._started, self._seconds = started, seconds
        self._phase: str | None = None
        self._since = 0.0
        self._wall = {"collect": 0.0, "learn": 0.0}
        self._ready: float | None = None
        self._first_wall = self._first_at = 0.0
        self._iterations = self._steps = 0
        self._cpu_before = self._wall_before = 0.0
        self.facts: dict[str, Any] = {}

    def begin(self, phase: str) -> None:
        """End the current phase and start this one."""
        now = time.perf_counter()
        if self._ready is None:
            self._ready = now
        self._close(now)
        self._phase = phase

    def _close(self, now: float) -> None:
        if self._phase is not None:
            self._wall[self._phase] += now - self._since
        self._since = now

    def done(self, steps: int, *, learned_for: float = 0.0) -> bool:
        """End an iteration; True when enough was measured.

        `learned_for`: seconds of the open phase that were learning, from a contender that hides the border between
        the two but reports it.
        """
        now = time.perf_counter()
        self._close(now)
        if self._phase is not None:
            self._wall[self._phase] -= learned_for
            self._wall["learn"] += learned_for
        self._phase = None
        assert self._ready is not None
        if self._iterations == 0:
            self._first_wall, self._first_at = now - self._ready, now - self._started
            self._wall = dict.fromkeys(self._wall, 0.0)
            self._cpu_before, self._wall_before = time.process_time(), now
        else:
            self._steps += steps
        self._iterations += 1
        return self._iterations > 1 and now - self._wall_before >= self._seconds

    @property
    def iterations_left(self) -> int:
        """For contenders that want a number of iterations in advance: more than enough."""
        return _MOST_ITERATIONS

    def result(self) -> dict[str, Any]:
        """Everything measured, rounded to what can be believed."""
        cpu = time.process_time() - self._cpu_before
        spent = sum(self._wall.values())
        per_iteration = spent / max(1, self._iterations - 1)
        assert self._ready is not None
        return {
            "steps_per_second": _rate(self._steps, spent),
            "collect_steps_per_second": _rate(self._steps, self._wall["collect"]),
            "learn_steps_per_second": _rate(self._steps, self._wall["learn"]),
            "steps": self._steps,
            "iterations": self._iterations - 1,
            "wall_seconds": round(spent, 3),
            "cpu_seconds": round(cpu, 3),
            "steps_per_cpu_second": _rate(self._steps, cpu),
            "startup_seconds": round(self._ready - self._started, 3),
            "first_update_seconds": round(self._first_wall, 3),
            "until_first_update_seconds": round(self._first_at, 3),
            # What the first iteration took beyond a usual one: compilation, mostly.
            "compile_seconds": round(max(0.0, self._first_wall - per_iteration), 3),
            "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
            **self.facts,
        }


def _rate(steps: int, seconds: float) -> float | None:
    return round(steps / seconds, 1) if seconds > 0 else None


def run_contender(
    name: str, train: Callable[[Workload, Meter, argparse.Namespace], None], packages: tuple[str, ...] = ()
) -> None:
    """The `main` of every contender: read the command line, train, print the line."""
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--started", type=float, default=time.perf_counter())
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--variant", default="")
    parser.add_argument("--num-envs", type=int, help="other than the workload's; steps per iteration stay the same")
    arguments = parser.parse_args()
    workload = WORKLOADS[arguments.workload]
    if arguments.num_envs:
        workload = replace(workload, num_envs=arguments.num_envs, num_steps=workload.batch // arguments.num_envs)
    meter = Meter(arguments.started, arguments.seconds)
    line: dict[str, Any] = {"contender": name, "workload": workload.name, "variant": arguments.variant}
    try:
        train(workload, meter, arguments)
        line |= meter.result() | {"versions": _versions(packages)}
    except Skip as reason:
        line["skipped"] = str(reason)
    print(json.dumps(line), flush=True)


def _versions(packages: tuple[str, ...]) -> Mapping[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
