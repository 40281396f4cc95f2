"""Out of memory, by the kernel's own hand in a memory cgroup of the test's."""

import asyncio
import contextlib
import json
import os
from pathlib import Path

import pytest
from tests.runs.attempts import create_attempt, read_outcome, run_attempt, with_timeout

from palaestra.runs.phase import PhaseEvent

LIMIT = 64 << 20


def _own_memory_cgroup():
    """Directory and name of the limit file of this process' memory cgroup, of either version."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path(f"/sys/fs/cgroup/memory{path}"), "memory.limit_in_bytes"
    return Path(f"/sys/fs/cgroup{path}"), "memory.max"


@pytest.fixture
def small_cgroup():
    parent, limit = _own_memory_cgroup()
    group = parent / f"palaestra-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(LIMIT))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield group
    group.rmdir()


def test_a_trainer_killed_for_memory_says_so(home, small_cgroup):
    attempt = create_attempt(home)
    code = (
        f"import os; open('{small_cgroup}/cgroup.procs', 'w').write(str(os.getpid())); held = []\n"
        "while True: held.append(bytearray(b'x' * (1 << 20)))"
    )

    async def body():
        async with run_attempt(attempt, code) as child:
            await with_timeout(child.wait())

    asyncio.run(body())
    assert json.loads(attempt.exit.read_text())["out_of_memory"] is True
    end = read_outcome(attempt)
    assert (end.event, end.reason, end.code) == (
        PhaseEvent.KILLED,
        "out of memory: the kernel killed it",
        "out_of_memory",
    )
