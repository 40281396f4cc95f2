"""A gateway as a child process on a free port of this machine, for runs that name none; and the check of one they name.

The child exits when this process does, for whatever reason: it watches its standard input, whose other end is ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from palaestra.errors import ConfigError, SessionFailed

__all__ = ["GatewayAddress", "check_gateway", "read_token", "start_gateway"]

TOKEN_VARIABLE = "PALAESTRA_GATEWAY_TOKEN"
START_S = 60.0
NICENESS = 10
"""Of the gateway and its browsers, which yield to the process that learns."""
STOP_S = 15.0


@dataclass(frozen=True)
class GatewayAddress:
    """The URL of a gateway, and the token it requires."""

    url: str
    token: str | None

    @property
    def description(self) -> str:
        """The start of a sentence about it."""
        return f"The gateway at {self.url}"


@contextlib.contextmanager
def start_gateway(
    *, max_sessions: int, servers: int, session_types: tuple[str, ...] = ("browser",)
) -> Iterator[GatewayAddress]:
    """Run a gateway while the block lasts."""
    token = secrets.token_urlsafe(24)
    settings = {
        "port": 0, "max_sessions": max_sessions, "servers": servers, "warm": 0, "stop_with_stdin": True,
        "session_types": list(session_types), "drain_s": 0, "max_ttl_s": 3600,
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "palaestra.gateway",
        *(f"{key}={json.dumps(value)}" for key, value in settings.items()),
    ]
    environment = {**os.environ, TOKEN_VARIABLE: token}
    # A process group of its own: Ctrl-C reaches this process alone, which lets running episodes finish first.
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0)
    # Browsers would starve the one process that learns; every process they start inherits the niceness.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, child.pid, NICENESS)
    try:
        yield GatewayAddress(_read_url(child), token)
    finally:
        _stop(child)


def check_gateway(url: str, token_file: Path | None) -> GatewayAddress:
    """The address of a gateway that runs already; `ConfigError` when it does not answer."""
    token = os.environ.get(TOKEN_VARIABLE) if token_file is None else read_token(token_file)
    request = urllib.request.Request(f"{url}/sessions")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=10):
            return GatewayAddress(url, token)
    except urllib.error.HTTPError as error:
        remedy = (
            "Give its token: environment.token_file, or PALAESTRA_GATEWAY_TOKEN"
            if error.code == 401
            else "Is it a gateway?"
        )
        raise ConfigError("environment.gateway", url, f"answers with status {error.code}", remedy) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            "environment.gateway", url, f"cannot be reached ({reason})",
            "Start it with `palaestra gateway`, or leave the key out: training then starts one",
        ) from None  # fmt: skip


def read_token(path: Path) -> str:
    """The token in a file."""
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError("environment.token_file", str(path), f"cannot be read ({error.strerror})") from None


def _read_url(child: subprocess.Popen[bytes]) -> str:
    """Wait for the URL that it prints when it listens."""
    assert child.stdout is not None
    end = time.monotonic() + START_S
    while (left := end - time.monotonic()) > 0:
        readable, _, _ = select.select([child.stdout], [], [], left)
        if readable:
            line = child.stdout.readline()
            if not line:
                raise SessionFailed("gateway_failed", f"the gateway ended with status {child.wait()} while starting")
            with contextlib.suppress(ValueError, KeyError):
                return str(json.loads(line)["url"])
    raise SessionFailed("gateway_failed", f"the gateway was not ready within {START_S:g} s")


def _stop(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.close()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    child.stdout.close()
