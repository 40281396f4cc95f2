"""Runs one program for as long as whoever asked for it lives: `python -I -S tool_keeper.py PROGRAM [WORD]...`

Its standard input is a pipe that the asker holds open. When that ends, however the asker came to its end, the program
and everything below it are ended as well. A signal on the death of a parent would not do: the kernel sends it when the
thread ends that started the program. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

__all__ = ["main"]

GRACE_S = 3.0
_SET_CHILD_SUBREAPER, _SET_PARENT_DEATH_SIGNAL = 36, 1


def main(argv: list[str]) -> int:
    """Start it, wait for it or for the end of the pipe; its exit code."""
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    def alone() -> None:
        # This process has one thread, and if it is killed itself nobody else would end the program.
        libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    program = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=alone)
    select.select([sys.stdin.fileno(), os.pidfd_open(program.pid)], [], [])
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE_S
        told: set[int] = set()
        # What has left the program's session is below us all the same: whoever loses its parent is given to us.
        while time.monotonic() < deadline and _any_left(program):
            for pid in _below(os.getpid()) - told:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                told.add(pid)
            time.sleep(0.01)
    return 1 if program.returncode is None else abs(program.returncode)


def _any_left(program: subprocess.Popen[bytes]) -> bool:
    """Reap what has ended; whether anything below this process has not."""
    if program.poll() is None:
        return True
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return True
    return False


def _below(root: int) -> set[int]:
    """Every living descendant."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                if fields[0] not in (b"Z", b"X"):
                    children.setdefault(int(fields[1]), []).append(int(name))
    found: set[int] = set()
    frontier = [root]
    while frontier:
        new = [pid for pid in children.get(frontier.pop(), []) if pid not in found]
        found.update(new)
        frontier += new
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
