"""How many cores a process may use, and when a child process ends."""

import os
import select
import signal
import subprocess
import sys

from palaestra.processes.children import usable_cores

PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
PARENT = """
import multiprocessing, os, sys
from concurrent.futures import ProcessPoolExecutor
from palaestra.processes.children import exit_with_parent

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(1, mp_context=context, initializer=exit_with_parent)
    print(executor.submit(os.getpid).result(), flush=True)
    sys.stdin.read()
"""


def test_processes_of_torchrun_divide_the_cores_of_their_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert usable_cores() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert usable_cores() == 2  # 8 // 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert usable_cores() == 1


def test_a_process_that_exits_with_its_parent_ends_when_the_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, script], **PIPES) as parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    ended, _, _ = select.select([child], [], [], 30)
    if not ended:
        signal.pidfd_send_signal(child, signal.SIGKILL)
    os.close(child)
    assert ended
