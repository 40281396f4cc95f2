"""Finds, starts and stops the run service of a state directory.

The first client starts the service; clients that look at the same time wait for it, and while a service is shutting
down they wait until it has ended. Only uses the standard library, so that a client is cheap to import.
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

from palaestra.errors import ServiceUnreachable, StateDirectoryLocked
from palaestra.extras import SERVER, require_extras
from palaestra.files.atomic import read_json
from palaestra.files.home import Home
from palaestra.processes.procfs import ProcessIdentity
from palaestra.runs.state.attempt_files import last_lines
from palaestra.runs.store.lock import find_lock_holder
from palaestra.runs.wire import JsonObject, error_from_json

_log = logging.getLogger(__name__)
IDLE_EXIT_S = 900.0
RESTART = "Stop it with: palaestra serve --stop. The next command starts a new one; runs are not affected."
_START_TIMEOUT_S = 60.0
_START_ATTEMPTS = 3
_RESPONSE_TIMEOUT_S = 5.0
_LOCK_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 120.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Endpoint:
    """URL and token of a service."""

    url: str
    token: str

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """A connection that is not open yet, encrypted if the URL is `https`."""
        parts = urllib.parse.urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname or "127.0.0.1", parts.port, timeout=timeout_s)


def find_service(home: Home, *, check: bool = True) -> Endpoint | None:
    """The service of a state directory; None when none answers, or without `check` when none is running."""
    data = read_json(home.endpoint)
    if data is None and home.endpoint.exists():
        data = read_json(home.lock)  # the endpoint file is damaged, and the lock names the same URL
    if data is None:
        return None
    identity = ProcessIdentity.from_json(data)
    if identity is None or not identity.is_alive():
        return None
    try:
        endpoint = Endpoint(str(data["url"]), home.token.read_text().strip())
    except (KeyError, OSError):
        return None
    return endpoint if not check or _is_healthy(endpoint) else None


def ensure_service(home: Home, *, start: bool = True, settings: JsonObject | None = None) -> Endpoint:
    """The service of a state directory, started if necessary. `ServiceUnreachable`, `StateDirectoryLocked`."""
    endpoint = find_service(home)
    if endpoint is not None:
        return endpoint
    _raise_if_suspended(home)
    if not start:
        raise ServiceUnreachable(f"no run service answers for {home.path}. Start it with: palaestra serve")
    require_extras("the run service", "serve", only=SERVER)
    with _start_lock(home):
        endpoint = find_service(home)
        if endpoint is not None:
            return endpoint
        for attempts_left in range(_START_ATTEMPTS, 0, -1):
            try:
                _start_process(home, {"idle_exit_s": IDLE_EXIT_S, **(settings or {})})
                break
            except StateDirectoryLocked:
                # A service started by hand at this moment will answer soon; an orchestrator never does.
                endpoint = _wait_for_service(home)
                if endpoint is not None:
                    return endpoint
                _raise_if_unusable(home)
                if find_lock_holder(home) is not None or attempts_left == 1:
                    raise
    endpoint = find_service(home)
    if endpoint is None:
        raise ServiceUnreachable(f"the run service of {home.path} started and does not answer. {_describe_log(home)}")
    return endpoint


def stop_service(home: Home, timeout_s: float = _STOP_TIMEOUT_S) -> int | None:
    """Stop the service of a state directory and wait until it has ended; runs continue.

    Returns its pid, or None when there was no service. `StateDirectoryLocked` when the lock holder is not a service.
    """
    holder = find_lock_holder(home)
    if holder is None:
        return None
    pid = holder.identity.pid
    if not holder.url:
        reason = f"is held by process {pid}, which is an orchestrator or a service that is starting"
        raise StateDirectoryLocked("state directory", str(home.path), reason, f"Try again, or end process {pid}")
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return pid
    try:
        # Checked again: from now on the pid cannot be reused.
        if holder.identity.is_alive():
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)  # a suspended process would not handle SIGTERM
        if not select.select([pidfd], [], [], timeout_s)[0]:
            text = f"the run service (process {pid}) has not ended within {timeout_s:.0f} s"
            raise ServiceUnreachable(f"{text}. {_describe_log(home)}")
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)
    return pid


def _is_healthy(endpoint: Endpoint) -> bool:
    connection = endpoint.connection(_RESPONSE_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def _start_lock(home: Home) -> Iterator[None]:
    """Lets one client at a time start a service."""
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


def _start_process(home: Home, settings: JsonObject) -> None:
    """Start a service that outlives this process, and wait for the first line of its output."""
    command = [sys.executable, "-m", "palaestra.runs.service.server", json.dumps(settings)]
    environment = {**os.environ, "PALAESTRA_HOME": str(home.base)}
    with open(_log_file(home), "ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=home.base,
            env=environment,
            start_new_session=True,
        )
    assert process.stdout is not None
    with process.stdout as pipe:
        line = _read_first_line(pipe.fileno())
    status = _parse_status(line)
    if "url" in status:
        if status.get("warning"):
            _log.warning("%s", status["warning"])
        # Keeps Python from warning about a child process that is still running.
        process.returncode = 0
        return
    timed_out = not line and not _has_exited(process)
    if timed_out:
        process.kill()
    process.wait()
    if "error" in status:
        raise error_from_json(status["error"])
    why = f" within {_START_TIMEOUT_S:.0f} s" if timed_out else ""
    text = f"the run service did not start{why} (exit code {process.returncode})"
    raise ServiceUnreachable(f"{text}. {_describe_log(home)}")


def _has_exited(process: subprocess.Popen[bytes]) -> bool:
    """Wait for a process that closed its output without writing a line."""
    try:
        process.wait(_RESPONSE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _read_first_line(descriptor: int) -> bytes:
    deadline, text = time.monotonic() + _START_TIMEOUT_S, b""
    while not text.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        block = os.read(descriptor, 4096) if ready else b""
        if not block:
            break
        text += block
    return text


def _parse_status(line: bytes) -> JsonObject:
    try:
        data = json.loads(line)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _wait_for_service(home: Home) -> Endpoint | None:
    """Wait until the service of the lock holder answers; None when it ended, or does not answer in time."""
    started = time.monotonic()
    while (holder := find_lock_holder(home)) is not None:
        endpoint = find_service(home)
        if endpoint is not None:
            return endpoint
        # A service that has removed its endpoint file is shutting down.
        is_stopping = holder.url and not home.endpoint.exists()
        if time.monotonic() - started >= (_STOP_TIMEOUT_S if is_stopping else _LOCK_TIMEOUT_S):
            return None
        time.sleep(_POLL_S)
    return None


def _raise_if_unusable(home: Home) -> None:
    """Raise the reason why the running service cannot be used."""
    holder = find_lock_holder(home)
    if holder is None or not holder.url:
        return
    pid = holder.identity.pid
    if _is_healthy(Endpoint(holder.url, "")):
        text = f"the run service (process {pid}) answers at {holder.url}, and {home.token} cannot be read."
        raise ServiceUnreachable(f"{text} {RESTART}")
    text = f"the run service (process {pid}) does not answer at {holder.url}"
    raise ServiceUnreachable(f"{text}. {RESTART} {_describe_log(home)}")


def _raise_if_suspended(home: Home) -> None:
    """Raise when the service is suspended by a signal or a debugger: it would never answer."""
    holder = find_lock_holder(home)
    if holder is None or not holder.url:
        return
    pid = holder.identity.pid
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1]
    except OSError:
        return
    if state in ([b"T"], [b"t"]):
        text = f"the run service (process {pid}) is suspended. Continue it with: kill -CONT {pid}"
        raise ServiceUnreachable(f"{text}, or stop it with: palaestra serve --stop")


def _log_file(home: Home) -> Path:
    return home.service / "service.log"


def _describe_log(home: Home) -> str:
    path = _log_file(home)
    last_line = last_lines(path, 1).strip()
    return f"Its log is {path}" + (f"; it ends with: {last_line}" if last_line else "")
