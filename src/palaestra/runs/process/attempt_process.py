"""The processes of an attempt: launch under a watchdog, wait through a pidfd, stop, adopt, and find what survived.

The watchdog outlives this process, so an attempt launched by an earlier service is adopted and then treated the same.
Nothing polls while the watchdog lives. If the watchdog was killed, the trainer is watched and stopped directly: by
process identity, by label and by descent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from palaestra.errors import LaunchRefused
from palaestra.files.atomic import write_json
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.processes.procfs import ProcessIdentity, find_by_environment, list_descendants, list_pids, read_stat
from palaestra.runs.process import watchdog
from palaestra.runs.record import RunEvent
from palaestra.runs.runner import LaunchPlan
from palaestra.runs.state.attempt_files import LABEL_VARIABLE, read_status
from palaestra.runs.state.unsupervised import find_journal_writer
from palaestra.runs.wire import JsonObject

_STUCK_AFTER_S = 10.0
"""Time beyond the grace period after which a watchdog is considered stuck."""

_RESERVED_STOP = ".stop.reserved"
_KILL_INTERVAL_S = 0.02


class AttemptProcess:
    """The watchdog and the trainer of one attempt, launched or adopted. Use from one event loop."""

    def __init__(self, attempt: Attempt) -> None:
        status = read_status(attempt)
        self.attempt = attempt
        self.watchdog, self.trainer = status.watchdog, status.trainer
        self._label = status.label
        self._watchdog_fd = _open_pidfd(status.watchdog)
        self._trainer_fd = _open_pidfd(status.trainer)

    @classmethod
    async def launch(
        cls, plan: LaunchPlan, attempt: Attempt, *, memory_mb: int | None = None, nice: int = 0
    ) -> AttemptProcess:
        """Start the plan in a prepared attempt and return once the trainer runs. `LaunchRefused` if it does not."""
        ready, pid = _spawn_watchdog(plan, attempt, memory_mb=memory_mb, nice=nice)
        try:
            await _wait_readable(ready)
            started = os.read(ready, 1)
        finally:
            os.close(ready)
        if started:
            return cls(attempt)
        handle = os.pidfd_open(pid)
        try:
            await _wait_readable(handle)
        finally:
            os.close(handle)
        _reap(pid)
        exit_ = read_status(attempt).exit
        reason = (exit_ and exit_.launch_error) or "its watchdog ended before the trainer started"
        raise LaunchRefused("command", plan.argv[0], reason, f"{attempt.stdout} may say more")

    @classmethod
    def adopt(cls, attempt: Attempt) -> AttemptProcess | None:
        """An attempt that another process launched; None if neither watchdog nor trainer is alive."""
        process = cls(attempt)
        return None if process._watchdog_fd is None and process._trainer_fd is None else process

    unreachable = ""
    """Why the machine of the attempt cannot be asked about it: this machine always can."""
    is_visible = True

    @property
    def watchdog_alive(self) -> bool:
        """Whether the watchdog is running and will record the exit."""
        return self.watchdog is not None and self.watchdog.is_alive()

    @property
    def watchdog_gone(self) -> bool:
        """Whether the trainer runs without a watchdog, so that its exit will not be recorded."""
        return self.trainer is not None and self.trainer.is_alive() and not self.watchdog_alive

    async def wait(self) -> None:
        """Wait until no process of the attempt is left."""
        if self._watchdog_fd is not None:
            await _wait_readable(self._watchdog_fd)
            if self.watchdog is not None:
                _reap(self.watchdog.pid)
        if self.attempt.exit.exists():
            return
        # The watchdog did not see the end: wait for the trainer directly and kill what it left.
        if self._trainer_fd is not None:
            await _wait_readable(self._trainer_fd)
        await kill_all(self._label, self.trainer)

    async def stop(self, reason: str, grace_s: float) -> None:
        """Request a stop, wait for the grace period, then kill. Returns when no process of the attempt is left."""
        request = {"schema": 1, "reason": reason, "by": "service", "grace_s": grace_s, "asked": time.time()}
        write_stop_request(self.attempt, request)
        if self.watchdog_alive and self._watchdog_fd is not None:
            _send_signal(self._watchdog_fd, signal.SIGTERM)
            if await _finishes_within(self.wait(), grace_s + watchdog.LEFTOVER_GRACE_S + _STUCK_AFTER_S):
                return
            # The watchdog is frozen or starved.
            if self._watchdog_fd is not None:
                _send_signal(self._watchdog_fd, signal.SIGKILL)
        elif self.trainer is not None and self.trainer.is_alive() and self._trainer_fd is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.trainer.pid, signal.SIGTERM)
            await _finishes_within(_wait_readable(self._trainer_fd), grace_s)
        await kill_all(self._label, self.trainer)
        await self.wait()

    def close(self) -> None:
        """Release the descriptors; the attempt keeps running. Idempotent."""
        handles, self._watchdog_fd, self._trainer_fd = (self._watchdog_fd, self._trainer_fd), None, None
        for handle in handles:
            if handle is not None:
                os.close(handle)


async def kill_all(label: str, trainer: ProcessIdentity | None) -> None:
    """Kill the trainer and all processes that carry the label or descend from those, until none is left."""
    while True:
        roots = find_by_environment(LABEL_VARIABLE, label) if label else set()
        if trainer is not None and trainer.is_alive():
            roots.add(trainer.pid)
        pids = roots | list_descendants(*roots)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(_KILL_INTERVAL_S)
        for pid in pids:
            _reap(pid)


class SurvivingProcesses(NamedTuple):
    """Live processes of an attempt that were found without process.json."""

    watchdog: ProcessIdentity | None
    trainer: ProcessIdentity | None
    label: str

    @property
    def alive(self) -> bool:
        """Whether there are any."""
        return self.watchdog is not None or self.trainer is not None


def find_survivors(attempt: Attempt) -> SurvivingProcesses:
    """Find the processes that carry the label of the attempt, and the one that holds the lock of its journal."""
    watchdog_, trainer, label = None, None, ""
    for pid, found_label in _labelled_processes(attempt):
        identity = ProcessIdentity.of(pid)
        if identity is None:
            continue
        label = found_label
        if _is_watchdog(pid, attempt):
            watchdog_ = _older(watchdog_, identity)
        elif _leads_session(pid):
            # The trainer starts a session before it executes the program.
            trainer = _older(trainer, identity)
    return SurvivingProcesses(watchdog_, trainer or _other_journal_writer(attempt), label)


def write_process_record(attempt: Attempt, survivors: SurvivingProcesses) -> None:
    """Write process.json like the watchdog does, so that the attempt can be adopted."""
    processes = {"watchdog": survivors.watchdog, "trainer": survivors.trainer}
    identities = {name: None if identity is None else asdict(identity) for name, identity in processes.items()}
    write_json(attempt.process, {"schema": 1, **identities, "label": survivors.label})


def check_no_trainer(run: RunDirectory) -> None:
    """Raise `LaunchRefused` while a process that the service did not start trains in the run."""
    for attempt in run.attempts():
        writer = _other_journal_writer(attempt)
        if writer is not None:
            reason = f"process {writer.pid} trains in its attempt {attempt.number}"
            raise LaunchRefused("run", run.run_id, reason, f"Wait for it, or end it with kill {writer.pid}")


def has_run(attempt: Attempt) -> bool:
    """Whether a trainer ever started in the attempt; a prepared directory can still be used."""
    if any(path.exists() for path in (attempt.process, attempt.exit, attempt.journal, attempt.remote)):
        return True
    try:
        return attempt.stdout.stat().st_size > 0
    except OSError:
        return False


def next_attempt(run: RunDirectory, last: int) -> int:
    """The number of a new attempt: beyond the last recorded one and all that have run."""
    return max([last, *(attempt.number for attempt in run.attempts() if has_run(attempt))]) + 1


def find_unrecorded_attempt(run: RunDirectory, events: Iterable[RunEvent]) -> Attempt | None:
    """The newest attempt that has run or runs, if the event log does not mention it."""
    last = max((event.attempt for event in events), default=0)
    for attempt in reversed(run.attempts()):
        if attempt.number <= last:
            return None
        if has_run(attempt) or find_survivors(attempt).alive:
            return attempt
    return None


def _spawn_watchdog(plan: LaunchPlan, attempt: Attempt, *, memory_mb: int | None, nice: int) -> tuple[int, int]:
    """Start a watchdog. Returns its pid and a pipe that gets a byte when the trainer runs and is closed otherwise."""
    label = f"{attempt.path.parent.name}/{attempt.number}/{os.urandom(8).hex()}"
    attempt.scratch.mkdir(exist_ok=True)
    # Reserve space for the stop request: a trainer that fills the disk must be stoppable. The watchdog removes it.
    with contextlib.suppress(OSError), open(attempt.path / _RESERVED_STOP, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 4096)
    ready, ready_writer = os.pipe()
    nothing = output = -1
    try:
        os.set_inheritable(ready_writer, True)
        launch: JsonObject = {
            "schema": 1,
            "argv": list(plan.argv),
            "cwd": str(plan.cwd),
            "memory_mb": memory_mb,
            "nice": nice,
            "label": label,
            "ready_fd": ready_writer,
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
        for descriptor in (ready_writer, nothing, output):
            if descriptor >= 0:
                os.close(descriptor)
    return ready, pid


def write_stop_request(attempt: Attempt, request: JsonObject) -> None:
    """Write stop.json, if need be into the space that was reserved for it."""
    try:
        write_json(attempt.stop, request)
    except OSError:
        reserved = attempt.path / _RESERVED_STOP
        with contextlib.suppress(OSError), open(reserved, "r+b") as file:
            file.write(json.dumps(request).encode())
            file.truncate()
            file.flush()
            reserved.replace(attempt.stop)


def _open_pidfd(identity: ProcessIdentity | None) -> int | None:
    """A pidfd of exactly this process; None if it is gone."""
    if identity is None or not identity.is_alive():
        return None
    try:
        handle = os.pidfd_open(identity.pid)
    except OSError:
        return None
    # Check again: the pid may have been reused before the pidfd was opened.
    if identity.is_alive():
        return handle
    os.close(handle)
    return None


async def _wait_readable(descriptor: int) -> None:
    """Wait until a descriptor is readable. A pidfd is readable when its process has ended."""
    loop = asyncio.get_running_loop()
    # A loop has one reader per descriptor and an attempt may have several waiters, so each waits on a copy.
    copy = os.dup(descriptor)
    readable = loop.create_future()
    loop.add_reader(copy, lambda: None if readable.done() else readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(copy)
        os.close(copy)


async def _finishes_within(work: Awaitable[None], seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        return False
    return True


def _send_signal(handle: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        signal.pidfd_send_signal(handle, number)


def _reap(pid: int) -> None:
    """Reap an ended child; an adopted process has another parent."""
    with contextlib.suppress(ChildProcessError, PermissionError):
        os.waitpid(pid, os.WNOHANG)


def _other_journal_writer(attempt: Attempt) -> ProcessIdentity | None:
    """The process that writes the journal, unless it is this one, which translates for some trainers."""
    writer = find_journal_writer(attempt)
    return None if writer is None or writer.pid == os.getpid() else writer


def _labelled_processes(attempt: Attempt) -> Iterable[tuple[int, str]]:
    """Processes of this user with a label of the attempt. The path excludes a run of the same name elsewhere."""
    prefix = f"{LABEL_VARIABLE}={attempt.path.parent.name}/{attempt.number}/".encode()
    path = os.fsencode(attempt.path)
    for pid in list_pids():
        with contextlib.suppress(OSError):
            environment = _read_proc(pid, "environ")
            labels = [word for word in environment.split(b"\0") if word.startswith(prefix)]
            if labels and (path in environment or path in _read_proc(pid, "cmdline")) and read_stat(pid) is not None:
                yield pid, os.fsdecode(labels[0].partition(b"=")[2])


def _older(one: ProcessIdentity | None, other: ProcessIdentity) -> ProcessIdentity:
    return other if one is None or other.started < one.started else one


def _leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except OSError:
        return False


def _is_watchdog(pid: int, attempt: Attempt) -> bool:
    try:
        words = _read_proc(pid, "cmdline").split(b"\0")
    except OSError:
        return False
    return os.fsencode(Path(watchdog.__file__)) in words and os.fsencode(attempt.path) in words


def _read_proc(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read() if os.fstat(file.fileno()).st_uid == os.getuid() else b""
