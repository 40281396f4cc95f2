"""One service per state directory: a file lock that the kernel releases when its holder ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Self

from palaestra.errors import ConfigError, StateDirectoryLocked
from palaestra.files.atomic import read_json
from palaestra.files.home import Home
from palaestra.processes.procfs import ProcessIdentity
from palaestra.runs.wire import JsonObject


class ServiceLock:
    """Context manager that holds the lock. Raises `StateDirectoryLocked` when another process holds it."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._descriptor = -1
        self._content: JsonObject = {}

    def __enter__(self) -> Self:
        home = self._home
        try:
            home.path.mkdir(parents=True, exist_ok=True)
            home.service.mkdir(mode=0o700, exist_ok=True)
            home.service.chmod(0o700)
            descriptor = os.open(home.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            reason = f"cannot be used ({error.strerror})"
            raise ConfigError("state directory", str(home.path), reason, "Set PALAESTRA_HOME elsewhere") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            locked = _locked_error(home, os.pread(descriptor, 4096, 0))
            os.close(descriptor)
            raise locked from None
        self._descriptor = descriptor
        process = ProcessIdentity.of(os.getpid())
        identity = {"pid": os.getpid()} if process is None else asdict(process)
        self._content = {"schema": 1, **identity, "host": socket.gethostname(), "since": time.time(), "url": ""}
        self._write()
        return self

    def publish_url(self, url: str) -> None:
        """Store the URL at which the service answers in the lock file."""
        self._content["url"] = url
        self._write()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.ftruncate(descriptor, 0)
            os.close(descriptor)

    def _write(self) -> None:
        # In place, because a replacement file would not be locked.
        data = json.dumps(self._content).encode()
        os.pwrite(self._descriptor, data, 0)
        os.ftruncate(self._descriptor, len(data))


@dataclass(frozen=True)
class LockHolder:
    """The process that holds the lock of a state directory: a service, or a program with an orchestrator."""

    identity: ProcessIdentity
    url: str
    """URL of the service; empty for an orchestrator, and for a service that is starting."""
    since: float | None
    """When it took the lock."""


def find_lock_holder(home: Home) -> LockHolder | None:
    """The running process that holds the lock of a state directory; None when there is none."""
    lock = read_json(home.lock)
    identity = ProcessIdentity.from_json(lock)
    if lock is None or identity is None or not identity.is_alive():
        return None
    since = lock.get("since")
    return LockHolder(identity, str(lock.get("url") or ""), since if isinstance(since, int | float) else None)


def _locked_error(home: Home, content: bytes) -> StateDirectoryLocked:
    try:
        data = json.loads(content)
        pid, host, url = int(data["pid"]), str(data["host"]), str(data.get("url", ""))
        since = time.strftime("%H:%M", time.localtime(float(data["since"])))
    except (ValueError, KeyError, TypeError):
        reason, remedy = "is held by another service", "Try again in a moment"
    else:
        reason = f"is held by process {pid} on host {host} since {since}" + (f", serving {url}" if url else "")
        remedy = f"End process {pid}"
        if url:
            remedy = "Use that one (palaestra runs list), or end it with: palaestra serve --stop"
    return StateDirectoryLocked("state directory", str(home.path), reason, remedy)
