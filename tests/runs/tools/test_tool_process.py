import os
import re
import signal
import subprocess
import sys
import time

import pytest
from tests.runs.attempts import TIMEOUT_S

from palaestra.errors import ConfigError
from palaestra.processes.procfs import ProcessIdentity
from palaestra.runs.process.tool_process import ToolProcess

PROGRAM = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
print("ready", os.getpid(), child.pid, os.environ.get("SOME_TOKEN"), flush=True)
time.sleep(1000)
"""
SERVICE = """
import re, sys, threading
from pathlib import Path
from palaestra.runs.process.tool_process import ToolProcess

def start():
    tool = ToolProcess([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]))
    print(tool.wait_for_output(re.compile(r"ready .*\\n"), 30)[0], end="", flush=True)
    kept.append(tool)

kept = []
thread = threading.Thread(target=start)
thread.start()
thread.join()  # the thread that started it has ended; the tool must not
print("joined", flush=True)
sys.stdin.read()
"""
READY = re.compile(r"ready (\d+) (\d+) (\w+)\n")


def identities(found):
    return [ProcessIdentity.of(int(pid)) for pid in found.groups()[:2]]


def gone(processes):
    deadline = time.monotonic() + TIMEOUT_S
    while any(one.is_alive() for one in processes) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(one.is_alive() for one in processes)


def test_a_tool_is_ended_with_everything_below_it_and_is_given_no_secrets(tmp_path):
    tool = ToolProcess(
        [sys.executable, "-c", PROGRAM], tmp_path / "log", {**os.environ, "SOME_TOKEN": "abc", "MARK": str(tmp_path)}
    )
    found = tool.wait_for_output(READY, TIMEOUT_S)
    processes = identities(found)
    assert tool.is_running
    assert all(one.is_alive() for one in processes)

    tool.stop()

    assert not tool.is_running
    assert not any(one.is_alive() for one in processes)
    assert found[3] == "None"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_tool_ends_when_its_service_is_killed(number, tmp_path):
    service = subprocess.Popen(
        [sys.executable, "-c", SERVICE, PROGRAM, str(tmp_path / "log")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    processes = identities(READY.fullmatch(service.stdout.readline().decode()))
    assert service.stdout.readline() == b"joined\n"
    assert all(one.is_alive() for one in processes)

    service.send_signal(number)
    service.communicate()

    assert gone(processes)


def test_a_tool_that_ends_at_once_or_never_speaks_is_told_with_its_last_line(tmp_path):
    dead = ToolProcess([sys.executable, "-c", "print('no such port'); raise SystemExit(3)"], tmp_path / "a")
    with pytest.raises(ConfigError, match="ended at once: no such port"):
        dead.wait_for_output(READY, TIMEOUT_S)

    mute = ToolProcess([sys.executable, "-c", "import time; time.sleep(1000)"], tmp_path / "b")
    with pytest.raises(ConfigError, match="it printed nothing"):
        mute.wait_for_output(READY, 0.0)
    assert not mute.is_running
