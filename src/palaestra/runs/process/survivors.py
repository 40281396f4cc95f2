"""Who of an attempt lives although the files that should say so are lost, and which attempts have run at all.

Asked before anything is launched into a run: two trainers in one attempt would ruin each other's work.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from palaestra.errors import LaunchRefused
from palaestra.files.atomic import write_json
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.processes.procfs import ProcessIdentity, list_pids, read_stat
from palaestra.runs.process import watchdog
from palaestra.runs.record import RunEvent
from palaestra.runs.state.attempt_status import LABEL_VARIABLE
from palaestra.runs.state.unsupervised import find_journal_writer

__all__ = [
    "Survivors",
    "check_unused",
    "has_run",
    "newer_attempt",
    "next_attempt",
    "other_holder",
    "put_on_record",
    "survivors",
]


class Survivors(NamedTuple):
    """Living processes of an attempt."""

    warden: ProcessIdentity | None
    trainer: ProcessIdentity | None
    label: str

    @property
    def alive(self) -> bool:
        """Whether there is anybody."""
        return self.warden is not None or self.trainer is not None


def survivors(attempt: Attempt) -> Survivors:
    """Whoever carries the attempt's label, and whoever holds the lock of its journal."""
    warden_, trainer, label = None, None, ""
    for pid, mark in _marked(attempt):
        identity = ProcessIdentity.of(pid)
        if identity is None:
            continue
        label = mark
        if _is_warden(pid, attempt):
            warden_ = _elder(warden_, identity)
        elif _leads_session(pid):
            # A trainer begins a session of its own before it begins.
            trainer = _elder(trainer, identity)
    return Survivors(warden_, trainer or other_holder(attempt), label)


def other_holder(attempt: Attempt) -> ProcessIdentity | None:
    """Who writes the attempt's journal, unless that is this process, which translates for some trainers."""
    holder = find_journal_writer(attempt)
    return None if holder is None or holder.pid == os.getpid() else holder


def put_on_record(attempt: Attempt, found: Survivors) -> None:
    """Write process.json as the warden did, so that the attempt can be watched and ended as any other."""
    who = {"warden": found.warden, "trainer": found.trainer}
    identities = {name: None if identity is None else asdict(identity) for name, identity in who.items()}
    write_json(attempt.process, {"schema": 1, **identities, "label": found.label})


def check_unused(run: RunDirectory) -> None:
    """`LaunchRefused` while somebody whom no service started trains in the run."""
    for attempt in run.attempts():
        holder = other_holder(attempt)
        if holder is not None:
            reason = f"process {holder.pid} trains in its attempt {attempt.number}"
            raise LaunchRefused("run", run.run_id, reason, f"Wait for it, or end it with kill {holder.pid}")


def has_run(attempt: Attempt) -> bool:
    """Whether a trainer ever began in it; a directory that was merely prepared may be used."""
    if any(path.exists() for path in (attempt.process, attempt.exit, attempt.journal)):
        return True
    try:
        return attempt.stdout.stat().st_size > 0
    except OSError:
        return False


def next_attempt(run: RunDirectory, known: int) -> int:
    """The number of a new attempt: beyond all that have run, whoever started them."""
    return max([known, *(attempt.number for attempt in run.attempts() if has_run(attempt))]) + 1


def newer_attempt(run: RunDirectory, life: Iterable[RunEvent]) -> Attempt | None:
    """The last attempt that has run or runs, when the life of the run knows nothing of it."""
    known = max((record.attempt for record in life), default=0)
    for attempt in reversed(run.attempts()):
        if attempt.number <= known:
            return None
        if has_run(attempt) or survivors(attempt).alive:
            return attempt
    return None


def _marked(attempt: Attempt) -> Iterable[tuple[int, str]]:
    """Our own processes with a label of the attempt; the path tells it from one of that name elsewhere."""
    begin = f"{LABEL_VARIABLE}={attempt.path.parent.name}/{attempt.number}/".encode()
    path = os.fsencode(attempt.path)
    for pid in list_pids():
        with contextlib.suppress(OSError):
            environment = _read(pid, "environ")
            marks = [word for word in environment.split(b"\0") if word.startswith(begin)]
            if marks and (path in environment or path in _read(pid, "cmdline")) and read_stat(pid) is not None:
                yield pid, os.fsdecode(marks[0].partition(b"=")[2])


def _elder(one: ProcessIdentity | None, other: ProcessIdentity) -> ProcessIdentity:
    return other if one is None or other.started < one.started else one


def _leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except OSError:
        return False


def _is_warden(pid: int, attempt: Attempt) -> bool:
    try:
        words = _read(pid, "cmdline").split(b"\0")
    except OSError:
        return False
    return os.fsencode(Path(watchdog.__file__)) in words and os.fsencode(attempt.path) in words


def _read(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read() if os.fstat(file.fileno()).st_uid == os.getuid() else b""
