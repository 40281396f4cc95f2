"""One attempt as a process: started under a warden of its own, watched through a pidfd, ended for certain.

The warden outlives this process, so an attempt that was started by an earlier service is adopted and is then no
different. Nothing here polls while a warden lives; when somebody killed the warden, its trainer is watched and ended
directly, by identity, by label and by descent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from palaestra.errors import LaunchRefused
from palaestra.files.atomic import write_json
from palaestra.files.run_directory import Attempt
from palaestra.processes.procfs import ProcessIdentity, find_by_environment, list_descendants
from palaestra.runs.process import watchdog
from palaestra.runs.runner import LaunchPlan
from palaestra.runs.state.attempt_status import LABEL_VARIABLE, read_status

__all__ = ["Child", "end_everything", "fresh_label", "spawn_warden"]

_MARGIN_S = 10.0
"""How long a warden may take beyond the grace before it is taken to be stuck."""

_STOP_SPACE = ".stop.reserved"
_PAUSE_S = 0.02
"""Between two looks at processes that nobody can be told to wait for."""


class Child:
    """One attempt, alive or adopted. Use from one event loop."""

    def __init__(self, attempt: Attempt) -> None:
        seen = read_status(attempt)
        self._attempt = attempt
        self._label = seen.label
        self._warden, self._trainer = seen.watchdog, seen.trainer
        self._warden_fd = _open(seen.watchdog)
        self._trainer_fd = _open(seen.trainer)

    @classmethod
    async def launch(cls, plan: LaunchPlan, attempt: Attempt, *, memory_mb: int | None = None, nice: int = 0) -> Child:
        """Start the plan in a prepared attempt; returns once the trainer runs. `LaunchRefused` when it does not."""
        ready, pid = spawn_warden(plan, attempt, memory_mb=memory_mb, nice=nice)
        try:
            await _readable(ready)
            began = os.read(ready, 1)
        finally:
            os.close(ready)
        if began:
            return cls(attempt)
        handle = os.pidfd_open(pid)
        try:
            await _readable(handle)
        finally:
            os.close(handle)
        _collect(pid)
        error = (read_status(attempt).exit or {}).get("launch_error")
        reason = str(error or "its warden ended before it could begin")
        raise LaunchRefused("command", plan.argv[0], reason, f"{attempt.stdout} may say more")

    @classmethod
    def adopt(cls, attempt: Attempt) -> Child | None:
        """An attempt that somebody else started; None when neither warden nor trainer lives."""
        child = cls(attempt)
        if child._warden_fd is None and child._trainer_fd is None:
            return None
        return child

    @property
    def attempt(self) -> Attempt:
        """Whose process it is."""
        return self._attempt

    @property
    def warden(self) -> ProcessIdentity | None:
        """Who stands by it."""
        return self._warden

    @property
    def trainer(self) -> ProcessIdentity | None:
        """Who trains."""
        return self._trainer

    @property
    def warden_gone(self) -> bool:
        """Whether the trainer lives and nobody will see it exit."""
        return self._trainer is not None and self._trainer.is_alive() and not (self._warden and self._warden.is_alive())

    async def ended(self) -> None:
        """Wait until nothing of the attempt lives."""
        if self._warden_fd is not None:
            await _readable(self._warden_fd)
            if self._warden is not None:
                _collect(self._warden.pid)
        if self._attempt.exit.exists():
            return
        # Nobody stood by to the end: the trainer is watched directly, and what it left is ended here.
        if self._trainer_fd is not None:
            await _readable(self._trainer_fd)
        await end_everything(self._label, self._trainer)

    async def stop(self, reason: str, grace_s: float, *, by: str = "service") -> None:
        """End it: ask, wait, insist. Returns when nothing of the attempt lives."""
        request = {"schema": 1, "reason": reason, "by": by, "grace_s": grace_s, "asked": time.time()}
        _request(self._attempt, request)
        if self._warden is not None and self._warden.is_alive() and self._warden_fd is not None:
            _signal(self._warden_fd, signal.SIGTERM)
            if await _within(self.ended(), grace_s + watchdog.LEFTOVER_GRACE_S + _MARGIN_S):
                return
            # A warden that was stopped or starved cannot do its work; its run must end all the same.
            if self._warden_fd is not None:
                _signal(self._warden_fd, signal.SIGKILL)
        elif self._trainer is not None and self._trainer.is_alive() and self._trainer_fd is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._trainer.pid, signal.SIGTERM)
            await _within(_readable(self._trainer_fd), grace_s)
        await end_everything(self._label, self._trainer)
        await self.ended()

    def close(self) -> None:
        """Let go of it; it goes on. Harmless when repeated."""
        handles, self._warden_fd, self._trainer_fd = (self._warden_fd, self._trainer_fd), None, None
        for handle in handles:
            if handle is not None:
                os.close(handle)


def fresh_label(attempt: Attempt) -> str:
    """What every process of the attempt will carry; unlike that of any other start, here or elsewhere."""
    return f"{attempt.path.parent.name}/{attempt.number}/{os.urandom(8).hex()}"


def spawn_warden(plan: LaunchPlan, attempt: Attempt, *, memory_mb: int | None, nice: int) -> tuple[int, int]:
    """Start a warden: a descriptor that is written to when the trainer runs and closed otherwise, and its pid."""
    label = fresh_label(attempt)
    attempt.scratch.mkdir(exist_ok=True)
    _reserve(attempt)
    ready, tell = os.pipe()
    nothing = output = -1
    try:
        os.set_inheritable(tell, True)
        launch: dict[str, Any] = {
            "schema": 1,
            "argv": list(plan.argv),
            "cwd": str(plan.cwd),
            "memory_mb": memory_mb,
            "nice": nice,
            "label": label,
            "ready_fd": tell,
        }
        write_json(attempt.launch, launch, mode=0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        output = os.open(attempt.stdout, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", str(Path(watchdog.__file__)), str(attempt.path)],
            {**plan.environment, LABEL_VARIABLE: label},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, nothing, 0),
                (os.POSIX_SPAWN_DUP2, output, 1),
                (os.POSIX_SPAWN_DUP2, output, 2),
            ],
            setsid=True,
            setsigmask=[],
        )
    except BaseException:
        os.close(ready)
        raise
    finally:
        for descriptor in (tell, nothing, output):
            if descriptor >= 0:
                os.close(descriptor)
    return ready, pid


def _reserve(attempt: Attempt) -> None:
    """Space for the request to stop: who fills the disk must be asked, too. The warden removes what was not used."""
    with contextlib.suppress(OSError), open(attempt.path / _STOP_SPACE, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 4096)


def _request(attempt: Attempt, request: dict[str, Any]) -> None:
    try:
        write_json(attempt.stop, request)
    except OSError:
        space = attempt.path / _STOP_SPACE
        with contextlib.suppress(OSError), open(space, "r+b") as file:
            file.write(json.dumps(request).encode())
            file.truncate()
            file.flush()
            space.replace(attempt.stop)


async def end_everything(label: str, trainer: ProcessIdentity | None) -> int:
    """Kill whatever carries the label or descends from it, until nothing does; how many processes that were."""
    killed: set[int] = set()
    while True:
        roots = find_by_environment(LABEL_VARIABLE, label) if label else set()
        if trainer is not None and trainer.is_alive():
            roots.add(trainer.pid)
        found = roots | list_descendants(*roots)
        if not found:
            return len(killed)
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
        await asyncio.sleep(_PAUSE_S)
        for pid in found:
            _collect(pid)


def _open(identity: ProcessIdentity | None) -> int | None:
    """A descriptor of exactly this process, or None when it is gone."""
    if identity is None or not identity.is_alive():
        return None
    try:
        handle = os.pidfd_open(identity.pid)
    except OSError:
        return None
    # Looked at again after opening: the number may have been given away in between.
    if identity.is_alive():
        return handle
    os.close(handle)
    return None


async def _readable(descriptor: int) -> None:
    """Wait until a descriptor has something to say. A pidfd speaks when its process has ended."""
    loop = asyncio.get_running_loop()
    # A copy of its own, because a loop knows one reader per descriptor and an attempt may have several waiters.
    own = os.dup(descriptor)
    spoke = loop.create_future()
    loop.add_reader(own, lambda: None if spoke.done() else spoke.set_result(None))
    try:
        await spoke
    finally:
        loop.remove_reader(own)
        os.close(own)


async def _within(work: Awaitable[None], seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        return False
    return True


def _signal(handle: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(handle, number)


def _collect(pid: int) -> None:
    """Take an ended child off the process table; one that was adopted belongs to somebody else."""
    with contextlib.suppress(ChildProcessError, PermissionError):
        os.waitpid(pid, os.WNOHANG)
