"""A program that runs one session server and makes sure that no process of it outlives the gateway.

    python -I -S process_guard.py DIRECTORY COMMAND...

The gateway holds the other end of standard input. When that end closes (the gateway stopped or was killed), or when the
server dies, all descendants are killed and DIRECTORY, the server's directory for temporary files, is removed. Orphans
of the server (browsers, renderers) become children of this process, so that it finds them. If this process is killed
itself, the kernel kills the server, and the next gateway finds the rest by label.
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
    # Started by path and without site-packages: only the tree of this package is needed.
    sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "..")))

from palaestra.processes.procfs import list_descendants

GRACE_S = 3.0
"""Seconds a server may take to exit after SIGTERM, so that it can close its browsers."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _spawn(command: list[str], directory: str) -> int:
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == guard:
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            os.execvpe(command[0], command, {**os.environ, "TMPDIR": directory})
    finally:
        os._exit(127)


class _Server:
    """The server process and its descendants."""

    def __init__(self, pid: int, wake: int) -> None:
        self.pid, self._wake = pid, wake
        self.status: int | None = None

    def reap(self) -> None:
        """Collect exited children, which include orphans of the server."""
        with contextlib.suppress(ChildProcessError):
            while (child := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if child[0] == self.pid:
                    self.status = os.waitstatus_to_exitcode(child[1])

    def wait(self, *, until: float | None = None, watch_input: bool = True) -> None:
        """Wait until the server exits, the gateway closes standard input, SIGTERM arrives, or `until` has passed."""
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
            # Nothing is ever sent on standard input, so readable means closed.
            if 0 in readable:
                return

    def stop(self) -> None:
        """Terminate the server, then kill what is left of it and of its descendants."""
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
    """Run a server until it or the gateway ends; the exit code is the server's, 128 + n for a death by signal n."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake, wakeup_fd = os.pipe()
    os.set_blocking(wakeup_fd, False)
    signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = _Server(_spawn(command, directory), wake)
    # The server must hold the only copy of standard output, or its end would not be noticed.
    os.close(1)
    server.wait()
    exited_on_its_own = server.status is not None
    server.stop()
    shutil.rmtree(directory, ignore_errors=True)
    status = server.status if server.status is not None else -signal.SIGKILL
    return 0 if not exited_on_its_own else status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
