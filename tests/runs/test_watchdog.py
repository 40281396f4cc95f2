"""The watchdog: what it records, and that the record survives failures around it."""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys

import pytest
from tests.runs.attempts import create_attempt, run_attempt, wait_for_output, wait_until, with_timeout

from palaestra.processes.procfs import ProcessIdentity, boot_id, find_by_environment
from palaestra.runs.process import watchdog
from palaestra.runs.state.attempt_files import LABEL_VARIABLE, read_status


def test_an_end_is_written_down_with_its_cost(home):
    attempt = create_attempt(home)

    async def body():
        async with run_attempt(attempt, "sum(range(10**6)); import sys; sys.exit(7)") as child:
            await with_timeout(child.wait())

    asyncio.run(body())
    record = json.loads(attempt.exit.read_text())
    assert record["schema"] == 1
    assert record["returncode"] == 7
    assert record["signal"] is None
    assert record["leftovers"] == 0
    assert record["launch_error"] == ""
    assert record["max_rss_kb"] > 1000
    assert 0 < record["user_s"] < 60
    assert record["duration_s"] >= 0


def test_a_trainer_is_on_record_before_its_first_instruction(home):
    attempt = create_attempt(home)
    # The trainer itself looks for the record of who it is.
    code = "import json, os; print(json.load(open('../process.json'))['trainer']['pid'] == os.getpid())"

    async def body():
        async with run_attempt(attempt, code) as child:
            await with_timeout(child.wait())

    asyncio.run(body())
    assert attempt.stdout.read_text() == "True\n"


def test_watchdog_and_trainer_are_known_by_pid_start_and_boot_and_carry_a_label(home):
    attempt = create_attempt(home)

    async def body():
        async with run_attempt(attempt, "import time; time.sleep(60)") as child:
            seen = read_status(attempt)
            assert seen.watchdog == child.watchdog == ProcessIdentity.of(child.watchdog.pid)
            assert seen.trainer.boot_id == boot_id()
            assert seen.label.startswith("run/1/")
            assert find_by_environment(LABEL_VARIABLE, seen.label) == {child.watchdog.pid, child.trainer.pid}
            assert os.getsid(child.trainer.pid) == child.trainer.pid != os.getsid(child.watchdog.pid)

    asyncio.run(body())


@pytest.mark.skipif(not os.path.exists("/proc/self/autogroup"), reason="this kernel has no autogroups")
def test_a_lower_priority_holds_for_the_session_of_the_trainer(home):
    attempt = create_attempt(home)
    code = "import os; print(os.nice(0), open('/proc/self/autogroup').read().split()[1:])"

    async def body():
        async with run_attempt(attempt, code, nice=7) as child:
            await with_timeout(child.wait())

    asyncio.run(body())
    assert attempt.stdout.read_text() == f"{os.nice(0) + 7} ['nice', '7']\n"


def test_orders_are_removed_and_files_are_private(home):
    attempt = create_attempt(home)

    async def body():
        async with run_attempt(attempt, "print('hi')") as child:
            await with_timeout(child.wait())

    asyncio.run(body())
    assert sorted(path.name for path in attempt.path.iterdir()) == ["exit.json", "process.json", "stdout.log", "work"]
    assert stat.S_IMODE(attempt.stdout.stat().st_mode) == 0o600


def test_the_temporary_directory_goes_with_the_attempt(home):
    attempt = create_attempt(home)
    code = "import tempfile; print(open(tempfile.mkstemp()[1], 'w').name)"

    async def body():
        async with run_attempt(attempt, code) as child:
            await with_timeout(child.wait())

    asyncio.run(body())
    assert attempt.stdout.read_text().startswith(str(attempt.scratch))
    assert not attempt.scratch.exists()


def test_sigterm_without_a_stop_request_is_recorded_as_shutdown(home):
    attempt = create_attempt(home)

    async def body():
        async with run_attempt(attempt, "import time; print('up'); time.sleep(60)") as child:
            await wait_for_output(attempt, "up")
            os.kill(child.watchdog.pid, signal.SIGTERM)
            await with_timeout(child.wait())

    asyncio.run(body())
    assert json.loads(attempt.stop.read_text())["reason"] == "shutdown"
    assert json.loads(attempt.exit.read_text())["stop_reason"] == "shutdown"


def test_hangup_and_interrupt_do_not_reach_the_run(home):
    attempt = create_attempt(home)

    async def body():
        async with run_attempt(attempt, "import time; print('up'); time.sleep(60)") as child:
            await wait_for_output(attempt, "up")
            os.kill(child.watchdog.pid, signal.SIGHUP)
            os.kill(child.watchdog.pid, signal.SIGINT)
            os.kill(child.watchdog.pid, 0)
            assert child.trainer.is_alive()
            await child.stop("operator", 5.0)

    asyncio.run(body())
    assert json.loads(attempt.exit.read_text())["stop_reason"] == "operator"


def test_a_second_bare_signal_ends_the_grace(home):
    attempt = create_attempt(home)
    code = "import signal, time; signal.signal(15, lambda *_: print('asked')); print('up'); time.sleep(600)"

    async def body():
        async with run_attempt(attempt, code) as child:
            await wait_for_output(attempt, "up")
            attempt.stop.write_text('{"schema": 1, "reason": "operator", "grace_s": 3600, "asked": 1.0}')
            os.kill(child.watchdog.pid, signal.SIGTERM)
            await wait_for_output(attempt, "asked")
            os.kill(child.watchdog.pid, signal.SIGTERM)
            await with_timeout(child.wait())

    asyncio.run(body())
    assert json.loads(attempt.exit.read_text())["signal"] == signal.SIGKILL


def test_a_second_request_shortens_the_grace_and_never_lengthens_it(home):
    attempt = create_attempt(home)
    code = "import signal, time; signal.signal(15, lambda *_: print('asked')); print('up'); time.sleep(600)"

    async def body():
        async with run_attempt(attempt, code) as child:
            await wait_for_output(attempt, "up")
            first = asyncio.ensure_future(child.stop("operator", 3600.0))
            await wait_for_output(attempt, "asked")
            await with_timeout(child.stop("operator", 0.1))
            await with_timeout(first)

    asyncio.run(body())
    assert json.loads(attempt.exit.read_text())["signal"] == signal.SIGKILL


def test_a_killed_watchdog_leaves_the_trainer_running(home):
    attempt = create_attempt(home)

    async def body():
        async with run_attempt(attempt, "input() if 0 else __import__('time').sleep(60)") as child:
            os.kill(child.watchdog.pid, signal.SIGKILL)
            await wait_until(lambda: not child.watchdog.is_alive())
            assert child.trainer.is_alive()
            assert child.watchdog_gone
            await with_timeout(child.stop("operator", 5.0))
            assert not child.trainer.is_alive()

    asyncio.run(body())
    assert not attempt.exit.exists()


def test_a_watchdog_costs_next_to_nothing():
    """It is there once per run: no site-packages, nothing of ours but the facts about processes."""
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); print(*sorted(m for m in sys.modules if 'palaestra' in m))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, watchdog.__file__], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [
        "palaestra",
        "palaestra.lazy",
        "palaestra.processes",
        "palaestra.processes.procfs",
    ]  # the root loads its names lazily
