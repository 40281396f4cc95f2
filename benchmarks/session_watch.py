"""What a gateway has running below it, seen from outside: processes, memory, open sessions, contexts, directories.

Contexts are counted by their renderers, since every context has its own process.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from palaestra.processes.procfs import list_descendants, start_ticks

__all__ = ["Below", "look"]


@dataclass(frozen=True)
class Below:
    """The processes below a gateway by what they are."""

    guards: frozenset[int]
    servers: frozenset[int]
    browsers: frozenset[int]
    renderers: frozenset[int]
    rest: frozenset[int]

    def all(self) -> frozenset[int]:
        return self.guards | self.servers | self.browsers | self.renderers | self.rest

    def busy(self, kind: str, *, idle: int) -> set[int]:
        """Browsers, or their servers, with more renderers than idle ones have."""
        browsers = {pid for pid in self.browsers if len(list_descendants(pid) & self.renderers) > idle}
        return browsers if kind == "browsers" else {pid for pid in self.servers if list_descendants(pid) & browsers}

    def renderers_by_browser(self) -> list[int]:
        return sorted(len(list_descendants(browser) & self.renderers) for browser in self.browsers)


def look(gateway: int) -> Below:
    kinds: dict[str, set[int]] = {"guards": set(), "servers": set(), "browsers": set(), "renderers": set()}
    rest = set()
    for pid in list_descendants(gateway):
        command = _command(pid)
        for kind, mark in (
            ("guards", b"process_guard.py"),
            ("servers", b"palaestra.sessions.server"),
            ("renderers", b"--type=renderer"),
        ):
            if mark in command:
                kinds[kind].add(pid)
                break
        else:
            (kinds["browsers"] if _is_browser(command) else rest).add(pid)
    return Below(rest=frozenset(rest), **{kind: frozenset(pids) for kind, pids in kinds.items()})


def _is_browser(command: bytes) -> bool:
    """Whether it is a browser's main process, and not the shell script that distributions start it with."""
    program = command.partition(b"\0")[0].rpartition(b"/")[2]
    return b"--remote-debugging-pipe" in command and b"--type=" not in command and program not in (b"sh", b"bash")


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def memory_mb(pids: Iterable[int]) -> float:
    """Proportional set size: what is shared is counted once."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return total / 1024


def identities(pids: Iterable[int]) -> set[tuple[int, int]]:
    """Processes for good: numbers are given to others later."""
    return {(pid, begun) for pid in pids if (begun := start_ticks(pid)) is not None}


def living(known: Iterable[tuple[int, int]]) -> set[int]:
    return {pid for pid, begun in known if start_ticks(pid) == begun}


def sessions_on(server: int) -> list[str]:
    """What a session server itself says is open."""
    with urllib.request.urlopen(f"http://127.0.0.1:{_port(server)}/sessions", timeout=30) as answer:
        return list(json.load(answer)["sessions"])


def _port(pid: int) -> int:
    """The port that a process listens on."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(descriptor))
        except OSError:
            continue
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
            return int(fields[1].rpartition(":")[2], 16)
    raise ProcessLookupError(f"process {pid} listens nowhere")
