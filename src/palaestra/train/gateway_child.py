"""The gateway that training starts when none is configured: a child process on a free port of this machine.

It ends with us, however we end: it watches its standard input, whose other end is ours.
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

from palaestra.errors import ConfigError, EnvironmentFailed

__all__ = ["GatewayAddress", "existing_gateway", "own_gateway", "read_token"]

TOKEN_VARIABLE = "PALAESTRA_GATEWAY_TOKEN"
START_S = 60.0
BEHIND_THE_LEARNER = 10
"""Niceness of the gateway and its browsers."""
STOP_S = 15.0


@dataclass(frozen=True)
class GatewayAddress:
    """Where a gateway is, and what it wants to hear."""

    url: str
    token: str | None

    @property
    def description(self) -> str:
        """The start of a sentence about it."""
        return f"The gateway at {self.url}"


@contextlib.contextmanager
def own_gateway(
    *, max_sessions: int, servers: int, session_types: tuple[str, ...] = ("browser",)
) -> Iterator[GatewayAddress]:
    """A gateway of our own while the block lasts."""
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
    # A group of its own: Ctrl-C is for us, who let running episodes finish; the gateway ends after them.
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0
    )  # fmt: skip
    # Browsers would starve the one process that learns; everything they start inherits this.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, child.pid, BEHIND_THE_LEARNER)
    try:
        yield GatewayAddress(_announced(child), token)
    finally:
        _ended(child)


def existing_gateway(url: str, token_file: Path | None) -> GatewayAddress:
    """A gateway that somebody else runs; `ConfigError` when it does not answer."""
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


def _announced(child: subprocess.Popen[bytes]) -> str:
    """The URL it prints when it listens."""
    assert child.stdout is not None
    end = time.monotonic() + START_S
    while (left := end - time.monotonic()) > 0:
        readable, _, _ = select.select([child.stdout], [], [], left)
        if readable:
            line = child.stdout.readline()
            if not line:
                raise EnvironmentFailed(
                    "gateway_failed", f"the gateway ended with status {child.wait()} while starting"
                )
            with contextlib.suppress(ValueError, KeyError):
                return str(json.loads(line)["url"])
    raise EnvironmentFailed("gateway_failed", f"the gateway was not ready within {START_S:g} s")


def _ended(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.close()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    child.stdout.close()
