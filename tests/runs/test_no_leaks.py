"""Runs that come and go leave nothing: no process, no descriptor, no thread, no temporary file."""

import asyncio
import os
import threading
from pathlib import Path

import pytest
from tests.runs.supervisors import echo, run_supervisor, wait_for_phase

from palaestra.processes.procfs import list_descendants
from palaestra.runs.phase import Phase


def _cycles(home, count):
    own = list_descendants(os.getpid())  # of other tests

    async def body():
        async with run_supervisor(home) as supervisor:
            await _cycle(supervisor)
            before = _held()
            for _ in range(count):
                await _cycle(supervisor)
            assert supervisor.idle
            return before, _held()

    before, after = asyncio.run(body())
    assert after == before
    assert _describe(list_descendants(os.getpid()) - own) == []
    assert not list(home.runs.glob("*/attempt_*/tmp"))
    assert not list(home.runs.rglob(".*.tmp"))
    assert not [path for path in home.runs.iterdir() if path.name.startswith(".")]


async def _cycle(supervisor):
    run_id = (await supervisor.submit(echo(steps=2, then="hang", fork="1:setsid"))).run_id
    await wait_for_phase(supervisor, run_id, Phase.RUNNING)
    assert (await supervisor.stop(run_id, grace_s=5)).phase is Phase.STOPPED


def _held():
    descriptors = sorted(os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _open(name))
    kinds = [name.partition(":")[0] for name in descriptors]
    # The default executor keeps its threads; how many it has started by now is its own business.
    threads = sorted(t.name for t in threading.enumerate() if not t.name.startswith("asyncio_"))
    return kinds, threads


def _describe(pids):
    return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in sorted(pids)]


def _open(name):
    return os.path.lexists(f"/proc/self/fd/{name}")


def test_ten_starts_and_stops_leave_nothing(home):
    _cycles(home, 10)


@pytest.mark.slow
def test_two_hundred_starts_and_stops_leave_nothing(home):
    _cycles(home, 200)
