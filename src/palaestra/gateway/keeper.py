"""Keeps one session server, and sees to it that nothing of it outlives the gateway. A program of its own.

    python -I -S keeper.py DIRECTORY COMMAND...

The gateway holds the other end of standard input. When that end closes (the gateway stopped, or was killed), or the
server dies, everything below this process is ended and DIRECTORY, in which the server keeps its temporary files, is
removed. Orphans of the server (browsers, renderers) become children of this process, so that they are found; if this
process itself is killed, the kernel kills the server, and the gateway's next start finds the rest by label.
Imports the standard library and `palaestra.processes.procfs` only, because one runs per server and must stay small.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time

if not __package__:
    # Started by path, without site-packages, in whatever directory: our own tree is all it needs.
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from palaestra.processes.procfs import list_descendants

__all__ = ["main"]

GRACE_S = 3.0
"""How long a server may take to end by itself, so that it can close its browsers in order."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _spawn(command: list[str], directory: str) -> int:
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == keeper:
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            os.execvpe(command[0], command, {**os.environ, "TMPDIR": directory})
    finally:
        os._exit(127)


class _Kept:
    """The server and what it left to us."""

    def __init__(self, pid: int, wake: int) -> None:
        self.pid, self._wake = pid, wake
        self.status: int | None = None

    def reap(self) -> None:
        """Collect whatever ended below us; orphans of the server are ours to collect, too."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if ended[0] == self.pid:
                    self.status = os.waitstatus_to_exitcode(ended[1])

    def wait(self, *, until: float | None = None, watch_input: bool = True) -> None:
        """Until the server ended, the gateway let go, or the time has come."""
        while True:
            self.reap()
            if self.status is not None:
                return
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return
            readable, _, _ = select.select([0, self._wake] if watch_input else [self._wake], [], [], left)
            if self._wake in readable and signal.SIGTERM in os.read(self._wake, 64):
                return
            # Nothing is ever sent to us: to be readable is to be closed.
            if 0 in readable:
                return

    def end(self) -> None:
        """Ask the server to end, then make sure of it and of everything below."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            self.wait(until=time.monotonic() + GRACE_S, watch_input=False)
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end:
            left = list_descendants(os.getpid()) | ({self.pid} if self.status is None else set())
            if not left:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            select.select([self._wake], [], [], 0.02)
            self.reap()


def main(directory: str, command: list[str]) -> int:
    """Keep a server until it or the gateway ends; answers as the server did, 128 + n for a death by signal n."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kept = _Kept(_spawn(command, directory), wake)
    # The server's own end of standard output must be the last one, or nobody sees it close.
    os.close(1)
    kept.wait()
    ended_by_itself = kept.status is not None
    kept.end()
    shutil.rmtree(directory, ignore_errors=True)
    status = kept.status if kept.status is not None else -signal.SIGKILL
    return 0 if not ended_by_itself else status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
