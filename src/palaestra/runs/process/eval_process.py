"""Runs `palaestra eval` on a checkpoint in a process of its own, so that the run service never imports torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import palaestra

_ROOT = str(Path(palaestra.__file__).parents[1])
_POLL_EVERY_S = 0.5


def eval_command(path: str) -> tuple[str, ...]:
    """The command that evaluates a checkpoint."""
    return (sys.executable, "-P", "-m", "palaestra", "eval", path)


def run_eval(
    path: str,
    *options: str,
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
    niceness: int = 0,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> subprocess.CompletedProcess[str]:
    """Play one episode; `TimeoutError` after `timeout_s`, or once `is_cancelled` returns True. No process is left.

    `niceness` lowers the CPU priority of the process.
    """
    process = subprocess.Popen(
        (*eval_command(path), "--episodes", "1", "--json", *options),
        env={**os.environ, **(variables or {}), "PYTHONPATH": _ROOT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + timeout_s
    try:
        if niceness:
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, errors = process.communicate(timeout=_POLL_EVERY_S)
                return subprocess.CompletedProcess(process.args, process.returncode, out, errors)
            if is_cancelled() or time.monotonic() > deadline:
                raise TimeoutError
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def last_error(process: subprocess.CompletedProcess[str]) -> str:
    """The last line that the process wrote to standard error."""
    return (process.stderr.strip().splitlines() or ["no error message"])[-1][:300]
