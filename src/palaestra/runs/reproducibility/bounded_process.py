"""Short-lived tools such as git: bounded in time and output, and ended with the service."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_POLL_S = 0.1


class ProcessOutput(NamedTuple):
    """What a tool printed."""

    data: bytes
    is_complete: bool
    """It has ended within its time and its output fits into the limit."""
    returncode: int | None


def run_bounded(
    argv: Sequence[str],
    *,
    max_bytes: int,
    timeout_s: float,
    environment: Mapping[str, str],
    cwd: str = "/",
    closing: threading.Event | None = None,
) -> ProcessOutput | None:
    """Run a program and return what it prints, cut to `max_bytes`; None if it cannot be started."""
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environment),
            cwd=cwd,
            start_new_session=True,
        )
    except OSError:
        return None
    deadline, data = time.monotonic() + timeout_s, bytearray()
    assert process.stdout is not None
    with process.stdout, selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        ended = False
        while not ended and len(data) <= max_bytes and time.monotonic() < deadline:
            if closing is not None and closing.is_set():
                break
            if selector.select(_POLL_S):
                block = os.read(process.stdout.fileno(), 1 << 16)
                data += block
                ended = not block
    try:
        returncode = process.wait(max(0.0, deadline - time.monotonic()) if ended else 0.0)
    except subprocess.TimeoutExpired:
        # It has a session of its own: this also ends what it has started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        returncode, ended = process.wait(), False
    is_complete = ended and len(data) <= max_bytes
    return ProcessOutput(bytes(data[:max_bytes]), is_complete, returncode if ended else None)
