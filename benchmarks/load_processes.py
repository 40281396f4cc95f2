"""The processes of a load test: gateways with simulated pages, their restarts, counts, memory and processor time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.session_watch import identities, memory_mb
from palaestra.gateway.config import OPERATOR_TOKEN_VARIABLE, TOKEN_VARIABLE
from palaestra.http.server import listen
from palaestra.processes.procfs import list_descendants

TOKEN, OPERATOR_TOKEN = "load-token-0123456789", "load-operator-0123456789"
_TICKS = os.sysconf("SC_CLK_TCK")


def pages_command(latency_s: float) -> list[str]:
    """The command of a session server with simulated pages."""
    return [sys.executable, "-m", "benchmarks.simulated_pages", "--latency", str(latency_s)]


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far; 0 once it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def start_process(
    *command: str, environment: dict[str, str]
) -> tuple[asyncio.subprocess.Process, dict[str, Any]]:
    """A process that has printed one line of JSON, and that line."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, env={**os.environ, **environment}
    )
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 120)
    return process, json.loads(line)


async def stop_process(process: asyncio.subprocess.Process, number: int = signal.SIGTERM) -> int:
    """Send a signal and wait; the exit code."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
    code = await asyncio.wait_for(process.wait(), 300)
    process._transport.close()  # type: ignore[attr-defined]
    return code


@dataclass
class GatewayProcess:
    """One gateway of a load test, which can be killed and started again at the same port."""

    settings: dict[str, Any]
    url: str
    process: asyncio.subprocess.Process | None = None
    past: Counter[str] = field(default_factory=Counter)
    """Totals of processes that were killed, as last scraped."""
    last: Counter[str] = field(default_factory=Counter)
    seen: set[tuple[int, int]] = field(default_factory=set)
    """Every process that was ever seen below it."""
    restarts: int = 0

    async def start(self) -> None:
        arguments = [f"{key}={json.dumps(value)}" for key, value in self.settings.items()]
        environment = {TOKEN_VARIABLE: TOKEN, OPERATOR_TOKEN_VARIABLE: OPERATOR_TOKEN, "OMP_NUM_THREADS": "1"}
        command = (sys.executable, "-m", "palaestra.gateway", *arguments)
        self.process, _ = await start_process(*command, environment=environment)

    async def restart(self, number: int) -> None:
        """End it with a signal and start another one at its port."""
        assert self.process is not None
        self.look()
        await stop_process(self.process, number)
        self.past += self.last
        self.last = Counter()
        self.restarts += 1
        await self.start()

    async def stop(self) -> int:
        assert self.process is not None
        self.look()
        return await stop_process(self.process)

    def look(self) -> None:
        """Remember the processes that it has."""
        assert self.process is not None
        self.seen |= identities({self.process.pid} | list_descendants(self.process.pid))

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def memory_mb(self) -> float:
        return round(memory_mb({self.pid}), 1)

    async def scrape(self, http: aiohttp.ClientSession) -> Counter[str]:
        """Its metrics; totals include those of its predecessors."""
        async with http.get(f"{self.url}/metrics") as answer:
            text = await answer.text()
        found = re.findall(r'^palaestra_gateway_(\w+)(?:\{(?:gateway="\w+",?)?([^}]*)\})? (\S+)$', text, re.MULTILINE)
        now = Counter({name + (f"{{{labels}}}" if labels else ""): float(value) for name, labels, value in found})
        self.last = Counter({name: value for name, value in now.items() if "_total" in name or "_bucket" in name})
        return Counter({name: now[name] + self.past[name] for name in now | self.past})

    def totals(self) -> Counter[str]:
        """Totals as last scraped, with those of its predecessors."""
        return Counter({name: self.last[name] + self.past[name] for name in self.last | self.past})


def free_ports(number: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [listen("127.0.0.1", 0, "port") for _ in range(number)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


@contextlib.asynccontextmanager
async def running_pages(number: int, latency_s: float) -> AsyncIterator[list[tuple[int, str]]]:
    """Session servers that no gateway started: process ids and URLs."""
    started = [await start_process(*pages_command(latency_s), environment={}) for _ in range(number)]
    try:
        yield [(process.pid, facts["url"]) for process, facts in started]
    finally:
        for process, _ in started:
            await stop_process(process)


@contextlib.asynccontextmanager
async def running_gateways(
    number: int, directory: Path, *, limit: int, servers: int, latency_s: float, pages: Sequence[str] = ()
) -> AsyncIterator[list[GatewayProcess]]:
    """Gateways that know each other; with `pages`, on these session servers, else each with its own."""
    urls = {chr(97 + place): f"http://127.0.0.1:{port}" for place, port in enumerate(free_ports(number))}
    gateways = []
    for name, url in urls.items():
        settings: dict[str, Any] = {
            "name": name, "port": int(url.rpartition(":")[2]), "max_sessions": limit, "drain_s": 0, "warm": 0,
            "state_dir": str(directory / f"state-{name}"),
            "peers": {other: there for other, there in urls.items() if other != name},
        }  # fmt: skip
        if pages:
            settings |= {"runtime": "servers", "session_servers": {"browser": list(pages)}}
        else:
            settings |= {"servers": servers, "server_command": pages_command(latency_s)}
        gateways.append(GatewayProcess(settings, url))
    try:
        for gateway in gateways:
            await gateway.start()
        yield gateways
    finally:
        for gateway in gateways:
            if gateway.process is not None and gateway.process.returncode is None:
                await gateway.stop()
