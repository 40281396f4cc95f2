"""What a gateway leaves behind when it is killed, and how the next one finds and removes it.

Every gateway has a directory of its own below the state directory, with a record of who it is (pid, start time, boot
id). Everything it starts carries the directory's name in its environment. A process is an orphan when it is ours by
user, carries the label of a gateway recorded here, and that gateway is dead: nothing else is ever touched.
Needs /proc; elsewhere the keepers alone see to it that nothing is left.
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
from palaestra.files.atomic import new_directory
from palaestra.processes.procfs import boot_id, list_descendants, list_pids, start_ticks

__all__ = ["LABEL", "Swept", "register", "sweep", "unregister"]

LABEL = "PALAESTRA_GATEWAY"
"""The environment variable that says which gateway a process belongs to."""

_RECORD = "gateway.json"
PATIENCE_S = 5.0


@dataclass(frozen=True)
class Swept:
    """What was found and removed."""

    gateways: int
    processes: int


@dataclass(frozen=True)
class _Identity:
    pid: int
    started: int | None
    boot_id: str


def register(state_dir: Path, name: str) -> Path:
    """This gateway's directory, with the record of who it is; `ConfigError` when the place is not safe to use."""
    _check_private(state_dir)
    directory = state_dir / name
    # A directory without a record could not be told from one whose gateway lives; so it appears with its record.
    with new_directory(directory, mode=0o700, durable=False) as unnamed:
        (unnamed / _RECORD).write_text(json.dumps(asdict(_Identity(os.getpid(), start_ticks(os.getpid()), boot_id()))))
    return directory


def unregister(directory: Path) -> None:
    """The gateway ends in order and leaves nothing."""
    shutil.rmtree(directory, ignore_errors=True)


def sweep(state_dir: Path) -> Swept:
    """Remove what dead gateways left below this state directory. Blocks until it is gone."""
    dead = [path for path in sorted(state_dir.glob("*")) if path.is_dir() and not _lives(path / _RECORD)]
    removed = _end_all({path.name.encode() for path in dead})
    for path in dead:
        shutil.rmtree(path, ignore_errors=True)
    return Swept(len(dead), removed)


def _check_private(state_dir: Path) -> None:
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = state_dir.lstat()
    except OSError as error:
        raise ConfigError("gateway.state_dir", str(state_dir), f"cannot be used ({error.strerror})") from None
    private = modes.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    if not private:
        reason = "is not a directory that belongs to us alone: somebody else could say what we are to kill"
        raise ConfigError("gateway.state_dir", str(state_dir), reason, "Choose another one, or chmod 700")


def _lives(record: Path) -> bool:
    """Whether the recorded gateway is still running. In doubt it is: an orphan costs memory, a mistake costs a run."""
    try:
        known = _Identity(**json.loads(record.read_text()))
    except (OSError, ValueError, TypeError):
        return True
    if known.started is None or known.boot_id != (boot := boot_id()) or not boot:
        return not (boot and known.boot_id)
    return start_ticks(known.pid) == known.started


def _end_all(labels: set[bytes]) -> int:
    """Kill until nothing carries a label any more; how many processes that were."""
    killed: set[int] = set()
    end = time.monotonic() + PATIENCE_S
    while labels and time.monotonic() < end:
        ours = {pid for pid in list_pids() if _label(pid) in labels}
        # Renderers write their title over their environment; they are found below those that carry the label.
        found = {pid for pid in ours | list_descendants(*ours) if _kill(pid, labels, ours)}
        if not found:
            return len(killed)
        killed |= found
        time.sleep(0.02)
    return len(killed)


def _label(pid: int) -> bytes | None:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                return None
            variables = file.read().split(b"\0")
    except OSError:
        return None
    mark = LABEL.encode() + b"="
    return next((variable.removeprefix(mark) for variable in variables if variable.startswith(mark)), None)


def _kill(pid: int, labels: set[bytes], ours: set[int]) -> bool:
    """Kill exactly the process that was looked at, even if its number is given to another one meanwhile."""
    if pid == os.getpid():
        return False
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if start_ticks(pid) is None or (pid in ours and _label(pid) not in labels):
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            return True
        return False
    finally:
        os.close(handle)
