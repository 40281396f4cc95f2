"""One service per state directory."""

import json
import os
import re
import signal
import stat
import subprocess
import sys

import pytest

from palaestra.errors import StateDirectoryLocked
from palaestra.runs.store.lock import ServiceLock

HOLD = """
from palaestra.files.home import Home
from palaestra.runs.store.lock import ServiceLock
with ServiceLock(Home.default()) as lock:
    lock.publish_url('http://127.0.0.1:1')
    print('held', flush=True)
    input()
"""


@pytest.fixture
def holder(home):
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_second_is_refused_and_told_who_holds_it(home, holder):
    message = (
        rf"state directory = '{re.escape(str(home.path))}': is held by process {holder.pid} on host \S+ since \d\d:\d\d"
        rf", serving http://127.0.0.1:1. Use that one \(palaestra runs list\), or end it with: palaestra serve --stop"
    )
    with pytest.raises(StateDirectoryLocked, match=message), ServiceLock(home):
        pass


def test_a_killed_holder_holds_nothing(home, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with ServiceLock(home):
        assert json.loads(home.lock.read_text())["pid"] == os.getpid()


def test_it_is_free_again_afterwards_and_private_all_the_time(home):
    for _ in range(2):
        with ServiceLock(home):
            assert stat.S_IMODE(home.service.stat().st_mode) == 0o700
            assert stat.S_IMODE(home.lock.stat().st_mode) == 0o600
    assert home.lock.read_text() == ""


def test_a_holder_that_has_not_said_who_it_is_yet_is_respected(home):
    with ServiceLock(home):
        home.lock.write_text("")
        with pytest.raises(StateDirectoryLocked, match="is held by another service"), ServiceLock(home):
            pass
