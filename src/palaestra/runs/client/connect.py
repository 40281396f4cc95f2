"""Finding the run service of a state directory, starting it when there is none, and ending it.

Who looks first starts it; who looks at the same time waits for that, and who looks while one is leaving waits until it
has left. Standard library only, so that a client costs nothing to import.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palaestra.errors import ServiceUnreachable, StateDirectoryLocked
from palaestra.files.atomic import read_json
from palaestra.files.home import Home
from palaestra.processes.procfs import ProcessIdentity
from palaestra.runs.state.attempt_status import last_lines
from palaestra.runs.wire import error_from_json

__all__ = ["Endpoint", "Holder", "end_service", "ensure_service", "find_service", "holder_of"]

_log = logging.getLogger(__name__)
IDLE_EXIT_S = 900.0
RESTART = "End it with: palaestra serve --stop. The next command starts another; runs go on meanwhile."
_START_S = 60.0
_STARTS = 3
_ANSWER_S = 5.0
_HOLDER_S = 5.0
_LEAVE_S = 120.0


@dataclass(frozen=True)
class Endpoint:
    """Where a service answers, and what it wants to hear."""

    url: str
    token: str

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """A connection to it, encrypted when its URL says `https`; not opened yet."""
        parts = urllib.parse.urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname or "127.0.0.1", parts.port, timeout=timeout_s)


@dataclass(frozen=True)
class Holder:
    """Who holds a state directory: a service, or the orchestrator of somebody's program."""

    identity: ProcessIdentity
    url: str
    """Where it answers; empty for an orchestrator, and for a service that has just begun."""


def holder_of(home: Home) -> Holder | None:
    """Who holds a state directory; None when nobody of this machine does."""
    told = read_json(home.lock)
    identity = ProcessIdentity.from_json(told)
    if told is None or identity is None or not identity.is_alive():
        return None
    return Holder(identity, str(told.get("url") or ""))


def find_service(home: Home) -> Endpoint | None:
    """The service of a state directory; None when none answers."""
    told = read_json(home.endpoint)
    if told is None and home.endpoint.exists():
        told = read_json(home.lock)  # damaged by somebody; the holder of the lock says the same
    if told is None:
        return None
    identity = ProcessIdentity.from_json(told)
    if identity is None or not identity.is_alive():
        return None
    try:
        endpoint = Endpoint(str(told["url"]), home.token.read_text().strip())
    except (KeyError, OSError):
        return None
    return endpoint if _answers(endpoint) else None


def ensure_service(home: Home, *, start: bool = True, settings: dict[str, Any] | None = None) -> Endpoint:
    """The service of a state directory, started when there is none. `ServiceUnreachable`, `StateDirectoryLocked`."""
    found = find_service(home)
    if found is not None:
        return found
    _refuse_if_stopped(home)
    if not start:
        raise ServiceUnreachable(f"no run service answers for {home.path}. Start it with: palaestra serve")
    with _first(home):
        found = find_service(home)
        if found is not None:
            return found
        for left in range(_STARTS, 0, -1):
            try:
                _start(home, {"idle_exit_s": IDLE_EXIT_S, **(settings or {})})
                break
            except StateDirectoryLocked:
                # Somebody started one by hand at this moment, and it will answer soon; an orchestrator never does.
                found = _awaited(home)
                if found is not None:
                    return found
                _refuse_if_held(home)
                if holder_of(home) is not None or left == 1:
                    raise
    found = find_service(home)
    if found is None:
        raise ServiceUnreachable(f"the run service of {home.path} started and does not answer. {_tail(home)}")
    return found


def _answers(endpoint: Endpoint) -> bool:
    connection = endpoint.connection(_ANSWER_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def _first(home: Home) -> Iterator[None]:
    """One at a time."""
    try:
        home.service.mkdir(parents=True, mode=0o700, exist_ok=True)
        descriptor = os.open(home.service / "starting", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        text = f"the state directory {home.path} cannot be used ({error.strerror}). Set PALAESTRA_HOME elsewhere."
        raise ServiceUnreachable(text) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _start(home: Home, settings: dict[str, Any]) -> None:
    """Start one that outlives us, and wait for its first line."""
    command = [sys.executable, "-m", "palaestra.runs.service.server", json.dumps(settings)]
    environment = {**os.environ, "PALAESTRA_HOME": str(home.base)}
    with open(_log_file(home), "ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, cwd=home.base, env=environment,
            start_new_session=True,
        )  # fmt: skip
    assert process.stdout is not None
    with process.stdout as pipe:
        line = _first_line(pipe.fileno())
    said = _parsed(line)
    if "url" in said:
        if said.get("warning"):
            _log.warning("%s", said["warning"])
        # It lives on without us; told so, Python does not complain that nobody waits for it.
        process.returncode = 0
        return
    late = not line and not _ended_by_itself(process)
    if late:
        process.kill()
    process.wait()
    if "error" in said:
        raise error_from_json(said["error"])
    why = f" within {_START_S:.0f} s" if late else ""
    raise ServiceUnreachable(f"the run service did not start{why} (exit code {process.returncode}). {_tail(home)}")


def _ended_by_itself(process: subprocess.Popen[bytes]) -> bool:
    """A process that closed its output without a word is on its way out."""
    try:
        process.wait(_ANSWER_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _first_line(descriptor: int) -> bytes:
    end, text = time.monotonic() + _START_S, b""
    while not text.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
        block = os.read(descriptor, 4096) if ready else b""
        if not block:
            break
        text += block
    return text


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _awaited(home: Home) -> Endpoint | None:
    """The service of whoever holds the directory, once it answers; None when it left, or does not."""
    began = time.monotonic()
    while (holder := holder_of(home)) is not None:
        found = find_service(home)
        if found is not None:
            return found
        # One that says where it answers, and has taken its address away, is on its way out.
        leaving = holder.url and not home.endpoint.exists()
        if time.monotonic() - began >= (_LEAVE_S if leaving else _HOLDER_S):
            return None
        time.sleep(0.05)
    return None


def _refuse_if_held(home: Home) -> None:
    """Say what is wrong with a service that does not answer, or that we cannot speak to."""
    holder = holder_of(home)
    if holder is None or not holder.url:
        return
    pid = holder.identity.pid
    if _answers(Endpoint(holder.url, "")):
        text = f"the run service (process {pid}) answers at {holder.url}, and {home.token} cannot be read."
        raise ServiceUnreachable(f"{text} {RESTART}")
    text = f"the run service (process {pid}) does not answer at {holder.url}"
    raise ServiceUnreachable(f"{text}. {RESTART} {_tail(home)}")


def _refuse_if_stopped(home: Home) -> None:
    """Waiting for a service that a signal or a debugger holds would be in vain."""
    holder = holder_of(home)
    if holder is None or not holder.url:
        return
    pid = holder.identity.pid
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1]
    except OSError:
        return
    if state in ([b"T"], [b"t"]):
        text = f"the run service (process {pid}) is stopped and answers nobody. Let it go on with: kill -CONT {pid}"
        raise ServiceUnreachable(f"{text}, or end it with: palaestra serve --stop")


def end_service(home: Home, timeout_s: float = _LEAVE_S) -> int | None:
    """Ask the service of a state directory to end, and wait until it is gone; runs go on.

    Its pid, or None when there was none. `StateDirectoryLocked` when the holder is no service.
    """
    holder = holder_of(home)
    if holder is None:
        return None
    pid = holder.identity.pid
    if not holder.url:
        reason = f"is held by process {pid}, which is an orchestrator or a service that has just begun"
        raise StateDirectoryLocked(
            "state directory", str(home.path), reason, f"Try again, or end process {pid} yourself"
        )
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return pid
    try:
        # Looked at once more now that the number cannot go to somebody else.
        if holder.identity.is_alive():
            signal.pidfd_send_signal(watched, signal.SIGTERM)
            signal.pidfd_send_signal(watched, signal.SIGCONT)  # one that is stopped would never hear of it
        if not select.select([watched], [], [], timeout_s)[0]:
            text = f"the run service (process {pid}) has not ended within {timeout_s:.0f} s"
            raise ServiceUnreachable(f"{text}. {_tail(home)}")
    except ProcessLookupError:
        pass
    finally:
        os.close(watched)
    return pid


def _log_file(home: Home) -> Path:
    return home.service / "service.log"


def _tail(home: Home) -> str:
    path = _log_file(home)
    last = last_lines(path, 1).strip()
    return f"Its log is {path}" + (f"; it ends with: {last}" if last else "")
