"""Runs a tool, such as TensorBoard, no longer than this process lives, and reads what it prints.

This file is also the program that watches the tool: `python -I -S tool_process.py PROGRAM [ARGUMENT]...`. Its standard
input is a pipe held open by the process that wants the tool. When that process ends for any reason, the pipe closes and
the watchdog ends the tool and all of its descendants. A parent-death signal would not do: the kernel sends it when the
*thread* that started the tool ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

if not __package__:
    # Started by path without site-packages: make our own package importable.
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))

from palaestra.errors import ConfigError
from palaestra.processes.procfs import list_descendants
from palaestra.redaction import is_secret_name

GRACE_S = 3.0
_POLL_S = 0.05
_SET_CHILD_SUBREAPER, _SET_PARENT_DEATH_SIGNAL = 36, 1
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class ToolProcess:
    """A running tool. It ends with `stop` or with this process."""

    def __init__(self, argv: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.argv, self._log = tuple(argv), log
        variables = os.environ if environment is None else environment
        # The tool needs no tokens, and its output is stored in a file.
        public = {name: value for name, value in variables.items() if not is_secret_name(name)}
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *argv],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=public,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        """Whether the tool is running."""
        return self._process.poll() is None

    def wait_for_output(self, pattern: re.Pattern[str], timeout_s: float) -> re.Match[str]:
        """Wait until the tool prints the pattern. `ConfigError` with its last line if it ends or takes too long."""
        deadline = time.monotonic() + timeout_s
        while True:
            running = self.is_running
            text = self._log.read_text(errors="replace")
            match = pattern.search(text)
            if match is not None:
                return match
            if not running or time.monotonic() > deadline:
                reason = f"was not ready within {timeout_s:.0f} s" if running else "ended at once"
                last = (text.strip().splitlines() or ["it printed nothing"])[-1]
                self.stop()
                raise ConfigError("tool", " ".join(self.argv[:3]), f"{reason}: {last[:300]}", f"See {self._log}")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End the tool and all of its descendants; returns when they are gone."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(4 * GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main(argv: list[str]) -> int:
    """Run the tool until it ends or standard input is closed; returns its exit code."""
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)

    def prepare_tool() -> None:
        # Should the watchdog itself be killed, the kernel ends the tool. Safe here: the watchdog has one thread.
        libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    tool = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=prepare_tool)
    select.select([sys.stdin.fileno(), os.pidfd_open(tool.pid)], [], [])
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + GRACE_S
        signalled: set[int] = set()
        # Orphans that left the session of the tool are descendants too: the watchdog is their subreaper.
        while time.monotonic() < deadline and _has_descendants(tool):
            for pid in list_descendants(os.getpid()) - signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                signalled.add(pid)
            time.sleep(0.01)
    return 1 if tool.returncode is None else abs(tool.returncode)


def _has_descendants(tool: subprocess.Popen[bytes]) -> bool:
    """Reap ended processes; whether any descendant is left."""
    if tool.poll() is None:
        return True
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
