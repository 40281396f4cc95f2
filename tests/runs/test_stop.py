"""Stopping: it returns only when nothing of the attempt lives, whatever the trainer does about it."""

import asyncio
import json
import os
import signal

from tests.runs.attempts import create_attempt, read_outcome, run_attempt, wait_for_output, wait_until, with_timeout

from palaestra.processes.procfs import ProcessIdentity
from palaestra.runs.process.attempt_process import AttemptProcess

_FAMILY = """
import os, signal, sys, time
def fork(*, session=False, deaf=False):
    if os.fork() == 0:
        if session:
            os.setsid()
        if deaf:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(f"<{os.getpid()}>", flush=True)
        time.sleep(600)
        os._exit(0)
"""


def _family_of(attempt):
    text = attempt.stdout.read_text()
    return [int(word.split(">")[0]) for word in text.split("<")[1:]]


def _identities(attempt):
    return [ProcessIdentity.of(pid) for pid in _family_of(attempt)]


def test_stop_returns_only_when_the_group_is_gone(home):
    attempt = create_attempt(home)
    code = _FAMILY + "fork(); fork(session=True); fork(deaf=True); fork(session=True, deaf=True); time.sleep(600)"

    async def body():
        async with run_attempt(attempt, code) as child:
            await wait_until(lambda: len(_family_of(attempt)) == 4)
            family = [*_identities(attempt), child.trainer, child.watchdog]
            assert all(member.is_alive() for member in family)
            await with_timeout(child.stop("operator", 0.2))
            assert not any(member.is_alive() for member in family)

    asyncio.run(body())
    assert json.loads(attempt.exit.read_text())["leftovers"] >= 1


def test_a_trainer_that_ignores_the_request_is_killed_after_its_grace(home):
    attempt = create_attempt(home)
    code = "import signal, time; signal.signal(15, lambda *_: print('asked')); print('up')\nwhile 1: time.sleep(60)"

    async def body():
        async with run_attempt(attempt, code) as child:
            await wait_for_output(attempt, "up")
            await with_timeout(child.stop("operator", 0.3))

    asyncio.run(body())
    assert "asked" in attempt.stdout.read_text()
    assert json.loads(attempt.exit.read_text())["signal"] == signal.SIGKILL
    assert read_outcome(attempt).reason == "stopped by the operator"


def test_a_trainer_may_use_its_grace_to_save(home):
    attempt = create_attempt(home)
    code = (
        "import signal, sys, time\n"
        "def end(*_):\n    open('saved', 'w').write('x'); sys.exit(0)\n"
        "signal.signal(15, end); print('up'); time.sleep(600)"
    )

    async def body():
        async with run_attempt(attempt, code) as child:
            await wait_for_output(attempt, "up")
            await with_timeout(child.stop("operator", 60.0))

    asyncio.run(body())
    assert (attempt.work / "saved").exists()


def test_what_a_trainer_leaves_behind_is_ended_and_counted(home):
    attempt = create_attempt(home)
    code = _FAMILY + "fork(session=True); fork(session=True)\ntime.sleep(0.2)"

    async def body():
        async with run_attempt(attempt, code) as child:
            await wait_until(lambda: len(_family_of(attempt)) == 2)
            family = _identities(attempt)
            await with_timeout(child.wait())
            assert not any(member.is_alive() for member in family if member)

    asyncio.run(body())
    record = json.loads(attempt.exit.read_text())
    assert (record["returncode"], record["leftovers"]) == (0, 2)


def test_orphans_of_orphans_are_found(home):
    attempt = create_attempt(home)
    daemon = "if os.fork() == 0:\n    os.setsid()\n    fork(session=True, deaf=True)\n    os._exit(0)\ntime.sleep(600)"

    async def body():
        async with run_attempt(attempt, _FAMILY + daemon) as child:
            await wait_until(lambda: len(_family_of(attempt)) == 1)
            (orphan,) = _identities(attempt)
            await with_timeout(child.stop("operator", 0.1))
            assert not orphan.is_alive()

    asyncio.run(body())


def test_without_a_watchdog_everything_is_found_by_label_and_descent(home):
    attempt = create_attempt(home)
    code = _FAMILY + "fork(); fork(session=True, deaf=True); time.sleep(600)"

    async def body():
        async with run_attempt(attempt, code) as child:
            await wait_until(lambda: len(_family_of(attempt)) == 2)
            family = [*_identities(attempt), child.trainer]
            os.kill(child.watchdog.pid, signal.SIGKILL)
            await wait_until(lambda: not child.watchdog.is_alive())
            await with_timeout(child.stop("operator", 0.2))
            assert not any(member.is_alive() for member in family)

    asyncio.run(body())
    assert read_outcome(attempt).reason == "stopped by the operator"


def test_a_watchdog_that_is_stuck_does_not_save_the_run(home, monkeypatch):
    monkeypatch.setattr("palaestra.runs.process.attempt_process._STUCK_AFTER_S", -5.0)
    attempt = create_attempt(home)

    async def body():
        async with run_attempt(attempt, "import time; print('up'); time.sleep(600)") as child:
            await wait_for_output(attempt, "up")
            os.kill(child.watchdog.pid, signal.SIGSTOP)
            await with_timeout(child.stop("operator", 0.2))
            assert not child.trainer.is_alive()
            assert not child.watchdog.is_alive()

    asyncio.run(body())


def test_a_frozen_trainer_is_ended_all_the_same(home):
    attempt = create_attempt(home)

    async def body():
        async with run_attempt(attempt, "import time; print('up'); time.sleep(600)") as child:
            await wait_for_output(attempt, "up")
            os.kill(child.trainer.pid, signal.SIGSTOP)
            await with_timeout(child.stop("operator", 0.2))
            assert not child.trainer.is_alive()

    asyncio.run(body())
    assert read_outcome(attempt).reason == "stopped by the operator"


def test_an_adopted_attempt_is_watched_and_stopped_like_an_own_one(home):
    attempt = create_attempt(home)

    async def body():
        async with run_attempt(attempt, "import time; print('up'); time.sleep(600)") as first:
            await wait_for_output(attempt, "up")
            second = AttemptProcess.adopt(attempt)
            assert (second.watchdog, second.trainer) == (first.watchdog, first.trainer)
            watching = [asyncio.ensure_future(first.wait()), asyncio.ensure_future(second.wait())]
            await with_timeout(second.stop("operator", 5.0))
            await with_timeout(asyncio.gather(*watching))
            second.close()
        assert AttemptProcess.adopt(attempt) is None

    asyncio.run(body())


def test_an_attempt_leaves_no_descriptor_behind(home):
    before = sorted(os.listdir("/proc/self/fd"))

    async def body():
        for number in (1, 2, 3):
            async with run_attempt(create_attempt(home, number=number), "import time; time.sleep(600)") as child:
                await with_timeout(child.stop("operator", 5.0))

    asyncio.run(body())
    assert sorted(os.listdir("/proc/self/fd")) == before
