"""Finds and removes the processes that a killed gateway left behind.

Every gateway has a directory below the state directory, with a record of its process (pid, start time, boot id). All
processes it starts have the directory's name as a label in their environment. A process is an orphan when it belongs to
this user, has the label of a gateway recorded here, and that gateway is dead; no other process is killed.
Needs /proc; elsewhere only the process guards clean up.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat as modes
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from palaestra.errors import ConfigError
from palaestra.files.atomic import atomic_directory
from palaestra.processes.procfs import ProcessIdentity, find_by_environment, list_descendants, read_stat, read_variable

LABEL = "PALAESTRA_GATEWAY"
"""The environment variable with the name of the gateway that started a process."""

_RECORD = "gateway.json"
KILL_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class RemovedOrphans:
    """The number of dead gateways and of their processes that were removed."""

    gateways: int
    processes: int


def register(state_dir: Path, name: str) -> Path:
    """Create this gateway's directory with its record; `ConfigError` when the state directory is not safe to use."""
    check_private(state_dir)
    directory = state_dir / name
    # The directory appears together with its record, because one without a record counts as alive.
    with atomic_directory(directory, mode=0o700, durable=False) as unnamed:
        identity = ProcessIdentity.of(os.getpid())
        (unnamed / _RECORD).write_text(json.dumps(None if identity is None else asdict(identity)))
    return directory


def unregister(directory: Path) -> None:
    """Remove the directory of a gateway that stops normally."""
    shutil.rmtree(directory, ignore_errors=True)


def remove_orphans(state_dir: Path) -> RemovedOrphans:
    """Kill the processes and remove the directories of dead gateways. Blocks until they are gone."""
    dead = [path for path in sorted(state_dir.glob("*")) if path.is_dir() and not _is_alive(path / _RECORD)]
    killed = _kill_all({path.name for path in dead})
    for path in dead:
        shutil.rmtree(path, ignore_errors=True)
    return RemovedOrphans(len(dead), killed)


def check_private(state_dir: Path) -> None:
    """Create the state directory; `ConfigError` when it cannot be used, or when other users can write to it."""
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = state_dir.lstat()
    except OSError as error:
        raise ConfigError("gateway.state_dir", str(state_dir), f"cannot be used ({error.strerror})") from None
    private = modes.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o022
    if not private:
        reason = "is not a directory that only this user can write to: others could choose which processes are killed"
        raise ConfigError("gateway.state_dir", str(state_dir), reason, "Choose another one, or chmod 700")


def _is_alive(record: Path) -> bool:
    """Whether the recorded gateway is running. In doubt it is: an orphan costs memory, a mistake costs a run."""
    try:
        identity = ProcessIdentity.from_json(json.loads(record.read_text()))
    except (OSError, ValueError):
        return True
    return identity is None or identity.is_alive()


def _kill_all(labels: set[str]) -> int:
    """Kill until no process has one of these labels; returns how many processes were killed."""
    killed: set[int] = set()
    end = time.monotonic() + KILL_TIMEOUT_S
    while labels and time.monotonic() < end:
        ours = find_by_environment(LABEL, *labels)
        # Renderers overwrite their environment with their title; they are found as descendants of labelled processes.
        matching = {pid for pid in ours | list_descendants(*ours) if _kill(pid, labels, ours)}
        if not matching:
            return len(killed)
        killed |= matching
        time.sleep(0.02)
    return len(killed)


def _kill(pid: int, labels: set[str], ours: set[int]) -> bool:
    """Kill exactly the process that was found, even if its pid is reused meanwhile."""
    if pid == os.getpid():
        return False
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if read_stat(pid) is None or (pid in ours and read_variable(pid, LABEL) not in labels):
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            return True
        return False
    finally:
        os.close(handle)
