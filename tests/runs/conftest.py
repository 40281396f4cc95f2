"""Every test has a state directory of its own, and none leaves a process behind."""

import os
import signal
import time

import pytest

from palaestra.files.home import Home
from palaestra.processes.procfs import list_pids, read_stat


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A state directory; `Home.default()` is the same one."""
    monkeypatch.setenv("PALAESTRA_HOME", str(tmp_path))
    return Home.default()


@pytest.fixture(autouse=True)
def nothing_is_left_running(request):
    """Fails a test after which a process lives that was started below the test's directory, and ends it."""
    if "tmp_path" not in request.fixturenames:
        yield
        return
    mark = os.fsencode(request.getfixturevalue("tmp_path"))
    yield
    deadline = time.monotonic() + 10
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"left running: {left}"


def _marked(mark):
    found = {}
    for pid in list_pids():
        if pid == os.getpid() or read_stat(pid) is None:
            continue
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as cmdline, open(f"/proc/{pid}/environ", "rb") as environ:
                command = cmdline.read()
                if mark in command or mark in environ.read():
                    found[pid] = command.replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
    return found
