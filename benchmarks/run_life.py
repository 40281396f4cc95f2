"""Times in the life of a run: to its first sign, to its end being known, to the last of its processes being gone.

A supervisor in this process, real trainers (the echo program) below it. `benchmarks.run_service` drives it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

from palaestra.files.home import Home
from palaestra.runs.config import SupervisorConfig
from palaestra.runs.phase import Phase
from palaestra.runs.record import RunEvent
from palaestra.runs.runners.echo import EchoRunner
from palaestra.runs.spec import RunSpec
from palaestra.runs.state.attempt_files import read_status
from palaestra.runs.store.rebuild import open_registry
from palaestra.runs.supervisor.supervisor import Supervisor
from palaestra.telemetry.event import Record

RUNS, PER_SECOND = 8, 1_000


@asynccontextmanager
async def supervising(home: Home) -> AsyncIterator[Supervisor]:
    registry = open_registry(home)
    config = SupervisorConfig(max_running=RUNS, min_free_disk_mb=0)
    supervisor = Supervisor(home, registry, {"echo": EchoRunner()}, config)
    try:
        await supervisor.start()
        yield supervisor
    finally:
        await supervisor.close()
        registry.close()


def echo(**config: object) -> RunSpec:
    return RunSpec(runner="echo", config=dict(config))


async def reaches(supervisor: Supervisor, run_id: str, *phases: Phase) -> RunEvent:
    async for item in supervisor.subscribe(run_id):
        if isinstance(item.item, RunEvent) and item.item.phase in phases:
            return item.item
    raise RuntimeError(f"{run_id} ended otherwise")


async def _lives(home: Home, cycles: int) -> dict[str, Any]:
    ended = [phase for phase in Phase if phase.has_ended]
    times: dict[str, list[float]] = {"to_running": [], "to_killed": [], "to_stopped": [], "to_adopted": []}

    def took(what: str, since: float) -> None:
        times[what].append(1e3 * (time.monotonic() - since))

    async with supervising(home) as supervisor:
        for _ in range(cycles):
            began = time.monotonic()
            run_id = (await supervisor.submit(echo(steps=5, then="hang"), None)).run_id
            await reaches(supervisor, run_id, Phase.RUNNING)
            took("to_running", began)
            trainer = read_status(home.run(run_id).attempt(1)).trainer
            assert trainer is not None
            began = time.monotonic()
            os.kill(trainer.pid, signal.SIGKILL)
            life = await reaches(supervisor, run_id, *ended)
            took("to_killed", began)
            assert life.phase is Phase.KILLED, life
            run_id = (await supervisor.submit(echo(steps=5, then="hang", fork="3:setsid"), None)).run_id
            await reaches(supervisor, run_id, Phase.RUNNING)
            began = time.monotonic()
            await supervisor.stop(run_id)
            took("to_stopped", began)
        runs = [(await supervisor.submit(echo(steps=5, then="hang"), None)).run_id for _ in range(RUNS)]
        for run_id in runs:
            await reaches(supervisor, run_id, Phase.RUNNING)
    for _ in range(cycles):
        began = time.monotonic()
        async with supervising(home) as supervisor:
            took("to_adopted", began)
    async with supervising(home) as supervisor:
        await asyncio.gather(*(supervisor.stop(run_id) for run_id in runs))
    return {f"{name}_ms": {"median": median(found), "max": max(found)} for name, found in times.items()}


async def _stream(home: Home, seconds: float) -> dict[str, Any]:
    rate = PER_SECOND / 1.1
    late: list[float] = []
    counts: list[int] = []

    async def follow(supervisor: Supervisor, run_id: str) -> None:
        seqs = []
        async for item in supervisor.subscribe(run_id):
            if isinstance(item.item, Record):
                late.append(time.time() - item.item.time)
                seqs.append(item.item.seq)
        assert seqs == list(range(1, len(seqs) + 1)), "a stream with a gap"
        counts.append(len(seqs))

    start = home.path / "start"
    async with supervising(home) as supervisor:
        spec = echo(steps=int(seconds * rate), rate=rate, metrics=4, wait_for=str(start))
        runs = [(await supervisor.submit(spec, None)).run_id for _ in range(RUNS)]
        followers = [asyncio.create_task(follow(supervisor, run_id)) for run_id in runs]
        for run_id in runs:
            await reaches(supervisor, run_id, Phase.STARTING)
        # All of them wait for it, so that none is late because another was still being launched.
        start.touch()
        await asyncio.gather(*followers)
    late.sort()
    updates = int(seconds * rate)
    return {
        "seconds": seconds,
        "events": sum(counts),
        "events_missing": RUNS * (updates + updates // 10 + 2) - sum(counts),
        "latency_p50_ms": 1e3 * late[len(late) // 2],
        "latency_p99_ms": 1e3 * late[int(0.99 * len(late))],
        "latency_max_ms": 1e3 * late[-1],
    }


def lives(place: Path, cycles: int) -> dict[str, Any]:
    """How long the turns of a run's life take."""
    return asyncio.run(_lives(Home(place / "var" / "training"), cycles))


def stream(place: Path, seconds: float) -> dict[str, Any]:
    """Eight trainers at once, launched and followed through the supervisor as a client follows them."""
    return asyncio.run(_stream(Home(place / "var" / "training"), seconds))
