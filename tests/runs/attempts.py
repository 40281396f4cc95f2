"""Attempts made of a few lines of Python, for tests that need a process rather than a trainer."""

import asyncio
import contextlib
import os
import sys
import time
from dataclasses import replace

from palaestra.runs.phase import determine_outcome
from palaestra.runs.process.attempt_process import AttemptProcess
from palaestra.runs.runner import AttemptPaths, LaunchPlan
from palaestra.runs.state.attempt_files import read_exit_facts

TIMEOUT_S = 60.0


def create_attempt(home, run_id="run", number=1):
    attempt = home.run(run_id).attempt(number)
    attempt.work.mkdir(parents=True)
    return attempt


def build_plan(attempt, code, *arguments, **changes):
    """A plan that runs Python code."""
    run = attempt.path.parent
    paths = AttemptPaths(run.name, attempt.number, run, attempt.path, attempt.work)
    environment = {"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1", "TMPDIR": str(attempt.scratch)}
    plan = LaunchPlan(
        argv=(sys.executable, "-c", code, *arguments),
        environment=environment,
        cwd=attempt.work,
        paths=paths,
        sources=(),
    )
    return replace(plan, **changes)


@contextlib.asynccontextmanager
async def run_attempt(attempt, code, *arguments, memory_mb=None, nice=0, **changes):
    """A running attempt; processes that are left are killed afterwards."""
    child = await AttemptProcess.launch(
        build_plan(attempt, code, *arguments, **changes), attempt, memory_mb=memory_mb, nice=nice
    )
    try:
        yield child
    finally:
        if child.watchdog.is_alive() or child.trainer.is_alive():
            await child.stop("operator", 0.0)
        child.close()


async def wait_until(fact, what="it"):
    """Wait for a condition; only a broken test reaches the deadline."""
    end = time.monotonic() + TIMEOUT_S
    while not (found := fact()):
        assert time.monotonic() < end, f"waited {TIMEOUT_S} s for {what}"
        await asyncio.sleep(0.01)
    return found


async def wait_for_output(attempt, text):
    """Wait until the attempt has printed a text."""
    await wait_until(lambda: attempt.stdout.exists() and text in attempt.stdout.read_text(), f"{text!r}")


async def with_timeout(work):
    return await asyncio.wait_for(work, TIMEOUT_S)


def read_outcome(attempt):
    return determine_outcome(read_exit_facts(attempt, lambda text: text))
