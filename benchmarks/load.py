"""Load: 256 sessions through a gateway, 32 actors and a learner, for minutes; is anything lost?

    python -m benchmarks.load [--minutes 15] [--restart-gateway-every SECONDS] [--signal KILL] [--gateways 1]
                              [--runtime local]

Holders keep 256 sessions open and look at each from time to time; 8 of them are pages of real browsers, the others are
simulated (`benchmarks.simulated_pages`: real session servers, drawn pages). Beside them `benchmarks.load_training`
trains with 32 actors, each episode in a session of its own, one in eight in a real browser. With restarts, gateways are
ended in turn and started again at their ports. Every episode that was scheduled must have exactly one outcome, every
session must be accounted for, the staleness must stay within its bound, and nothing may be left at the end. Writes a
section of benchmarks/results/load.{json,md} (`soak`, `restarts_local`, `restarts_servers` or `gateways_N`) and fails
when a check does. `--report` writes load.md again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.load_processes import (
    OPERATOR_TOKEN,
    TOKEN,
    GatewayProcess,
    cpu_seconds,
    running_gateways,
    running_pages,
    stop_process,
)
from benchmarks.load_report import write_report
from benchmarks.load_scaling import update_results
from benchmarks.machine import facts, load
from benchmarks.session_watch import living
from palaestra.errors import SessionFailed, SessionRefused
from palaestra.gateway.config import TOKEN_VARIABLE
from palaestra.sessions.clients.client import GatewayClient, SessionClient
from palaestra.sessions.task import TaskRequest

TTL_S = 60.0
START_S = 600.0
SAMPLE_S = 5.0
REAL = TaskRequest("click_target/button", 1, {"difficulty": 2})
SIMULATED = TaskRequest("fake/button", 1)


@dataclass(frozen=True)
class Plan:
    """How much, and for how long."""

    minutes: float = 15.0
    sessions: int = 256
    """Sessions that are held open."""
    real: int = 8
    """How many of them are pages of real browsers."""
    actors: int = 32
    max_staleness: int = 1
    gateways: int = 1
    servers: int = 4
    """Session servers, each with a browser of its own."""
    runtime: str = "local"
    latency_s: float = 0.25
    look_every_s: float = 10.0
    """Seconds between two looks at a held session."""
    restart_gateway_every: float = 0.0
    """Seconds between restarts; 0: none."""
    signal: str = "KILL"

    @property
    def section(self) -> str:
        """The part of the results that this run replaces."""
        if self.restart_gateway_every:
            return f"restarts_{self.runtime}"
        return "soak" if self.gateways == 1 else f"gateways_{self.gateways}"


@dataclass
class Books:
    """What the holders and the watcher saw."""

    opened: int = 0
    looks: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Looks and openings that failed, by reason."""
    replaced: int = 0
    """Held sessions that were gone and were opened again."""
    seconds: list[float] = field(default_factory=list)
    """Duration of every look."""
    open_seconds: list[float] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)
    """Seconds that each restart took, until the gateway answered again."""


class Holder:
    """Holds sessions open and looks at each of them from time to time."""

    def __init__(self, client: GatewayClient, plan: Plan, books: Books) -> None:
        self._client, self._plan, self._books = client, plan, books

    async def hold(self, number: int, is_open: asyncio.Event) -> None:
        """Hold session `number` until cancelled; one that is lost is replaced and counted."""
        task = REAL if number < self._plan.real else SIMULATED
        while True:
            session: SessionClient | None = None
            try:
                began = time.perf_counter()
                session = await self._client.open(ttl_s=TTL_S)
                self._books.open_seconds.append(time.perf_counter() - began)
                self._books.opened += 1
                await session.reset(task)
                is_open.set()
                while True:
                    await asyncio.sleep(self._plan.look_every_s)
                    began = time.perf_counter()
                    await session.screenshot()
                    self._books.seconds.append(time.perf_counter() - began)
                    self._books.looks += 1
            except (SessionFailed, SessionRefused) as error:
                self._books.failures[getattr(error, "reason", "") or getattr(error, "code", "")] += 1
                self._books.replaced += 1
            finally:
                if session is not None:
                    await session.close()


async def watch(gateways: list[GatewayProcess], trainer: int, books: Books) -> None:
    """Memory, processor time and open sessions, every few seconds."""
    began = time.monotonic()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {OPERATOR_TOKEN}"}) as http:
        while True:
            sample = {"at_s": round(time.monotonic() - began, 1), "trainer_cpu_s": round(cpu_seconds(trainer), 1)}
            sample["gateway_mb"], sample["leased"] = 0.0, 0.0
            sample["gateway_cpu_s"] = round(sum(cpu_seconds(gateway.pid) for gateway in gateways), 1)
            for gateway in gateways:
                gateway.look()
                # A gateway that restarts does not answer; its sample is left out.
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    found = await gateway.scrape(http)
                    sample["leased"] += found['sessions{state="leased"}'] + found['sessions{state="opening"}']
                    sample["gateway_mb"] += gateway.memory_mb()
            books.samples.append(sample)
            await asyncio.sleep(SAMPLE_S)


async def restart_in_turn(gateways: list[GatewayProcess], plan: Plan, books: Books, until: float) -> None:
    """End and start one gateway after the other, until shortly before the end."""
    number = 0
    while time.monotonic() + plan.restart_gateway_every + 10 < until:
        await asyncio.sleep(plan.restart_gateway_every)
        began = time.monotonic()
        await gateways[number % len(gateways)].restart(getattr(signal, f"SIG{plan.signal}"))
        books.restarts.append(round(time.monotonic() - began, 2))
        number += 1
    await asyncio.sleep(max(0.0, until - time.monotonic()))


async def train(url: str, ledger: Path, plan: Plan) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.load_training", url, str(ledger), "--actors", str(plan.actors),
        "--max-staleness", str(plan.max_staleness),
        env={**os.environ, TOKEN_VARIABLE: TOKEN, "OMP_NUM_THREADS": "1"}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def run_load(plan: Plan) -> dict[str, Any]:
    """The whole of it, and the checks."""
    directory = Path(tempfile.mkdtemp(prefix="palaestra-load-"))
    books = Books()
    limit = -(-(plan.sessions + plan.actors + 8) // plan.gateways)
    try:
        async with contextlib.AsyncExitStack() as stack:
            pages: list[tuple[int, str]] = []
            if plan.runtime == "servers":
                pages = await stack.enter_async_context(running_pages(plan.servers, plan.latency_s))
            starting = running_gateways(
                plan.gateways, directory, limit=limit, servers=plan.servers, latency_s=plan.latency_s,
                pages=[url for _, url in pages],
            )  # fmt: skip
            gateways = await stack.enter_async_context(starting)
            await play(gateways, plan, books, directory / "ledger.json")
            left_open = await list_sessions(gateways, [url for _, url in pages])
            codes = [await gateway.stop() for gateway in gateways]
            left_processes = living(set().union(*(gateway.seen for gateway in gateways)))
            litter = [str(path.relative_to(directory)) for path in directory.glob("state-*/*")]
        ledger = json.loads((directory / "ledger.json").read_text())
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return summarise(plan, books, ledger, gateways) | {
        "checks": check(plan, books, ledger, gateways)
        | {
            "no session is open on a gateway or a server at the end": not left_open,
            "every gateway ended in order": set(codes) == {0},
            "no process and no file is left": not left_processes and not litter,
        }
    }


async def play(gateways: list[GatewayProcess], plan: Plan, books: Books, ledger: Path) -> None:
    """Hold sessions and train until the time is over."""
    client = GatewayClient(gateways[-1].url, token=TOKEN)
    holder, opened = Holder(client, plan, books), [asyncio.Event() for _ in range(plan.sessions)]
    tasks = [asyncio.create_task(holder.hold(number, event)) for number, event in enumerate(opened)]
    await asyncio.gather(*(event.wait() for event in opened))
    trainer = await train(gateways[0].url, ledger, plan)
    tasks.append(asyncio.create_task(watch(gateways, trainer.pid, books)))
    try:
        assert trainer.stdout is not None
        # Loading the model and the first update are not part of the time.
        await asyncio.wait_for(trainer.stdout.readline(), START_S)
        until = time.monotonic() + 60 * plan.minutes
        if plan.restart_gateway_every:
            await restart_in_turn(gateways, plan, books, until)
        else:
            await asyncio.wait({asyncio.create_task(trainer.wait())}, timeout=60 * plan.minutes)
    finally:
        await stop_process(trainer)
        failed = [task.exception() for task in tasks if task.done() and not task.cancelled()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()
        await scrape_all(gateways)
    if failed:
        raise RuntimeError(f"a holder or the watcher failed: {failed[0]!r}") from failed[0]


async def scrape_all(gateways: list[GatewayProcess]) -> None:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {OPERATOR_TOKEN}"}) as http:
        for gateway in gateways:
            await gateway.scrape(http)


async def list_sessions(gateways: list[GatewayProcess], pages: list[str]) -> list[str]:
    """Every session that a gateway or a session server still has.

    What a killed gateway had opened for a client that never got the answer ends with its lease; that is waited for.
    """
    end = time.monotonic() + TTL_S + 40.0
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {OPERATOR_TOKEN}"}) as http:
        while True:
            found = []
            for url in (*(gateway.url for gateway in gateways), *pages):
                async with http.get(f"{url}/sessions") as answer:
                    found += [str(one) for one in (await answer.json())["sessions"]]
            if not found or time.monotonic() > end:
                return found
            await asyncio.sleep(1.0)


def summarise(plan: Plan, books: Books, ledger: dict[str, Any], gateways: list[GatewayProcess]) -> dict[str, Any]:
    """The figures of a run."""
    totals = sum((gateway.totals() for gateway in gateways), Counter())
    steady = [sample for sample in books.samples if sample["leased"]]
    leased = sorted(sample["leased"] for sample in steady)
    return {
        "plan": asdict(plan),
        "episodes": {
            "scheduled": len(ledger["scheduled"]), "received": len(ledger["received"]),
            "running_at_stop": len(ledger["cancelled"]), "unread_at_stop": len(ledger["unread"]),
            "crashed": len(ledger["crashed"]), "unaccounted": len(ledger["unaccounted"]),
            "twice": len(ledger["received_twice"]), "outcomes": dict(Counter(ledger["received"].values())),
            "failed_attempts": ledger["failed_attempts"], "dropped_stale": ledger["dropped_stale"],
            "learned": ledger["learned"], "updates": ledger["updates"],
            "per_second": round(len(ledger["received"]) / ledger["took_s"], 2),
            "seconds": quantiles(ledger["seconds"]),
        },
        "staleness": dict(sorted(ledger["staleness"].items())),
        "sessions": {
            "held": plan.sessions, "leased_median": leased[len(leased) // 2] if leased else 0,
            "leased_max": leased[-1] if leased else 0, "held_replaced": books.replaced,
            **{name: int(totals[f"sessions_{name}_total"])
               for name in ("created", "closed", "reaped", "lost", "failed", "refused", "adopted")},
        },
        "requests": {
            "proxied": int(sum(value for name, value in totals.items() if name.startswith("proxy_requests_total"))),
            "statuses": {name.split('"')[1]: int(value) for name, value in sorted(totals.items())
                         if name.startswith("proxy_requests_total")},
            "looks": books.looks, "failed_looks": dict(books.failures), "look": quantiles(books.seconds),
            "open": quantiles(books.open_seconds),
            "forwarded": int(sum(v for name, v in totals.items() if name.startswith("peer_requests_total"))),
        },
        "memory_mb": thirds([sample["gateway_mb"] for sample in steady]),
        "restarts": {"number": len(books.restarts), "seconds": books.restarts},
        "samples": books.samples, "failure": ledger["failure"],
    }  # fmt: skip


def check(plan: Plan, books: Books, ledger: dict[str, Any], gateways: list[GatewayProcess]) -> dict[str, bool]:
    """What must hold."""
    totals = sum((gateway.totals() for gateway in gateways), Counter())
    failed_requests = sum(value for name, value in totals.items() if name.startswith('proxy_requests_total{status="5'))
    checks = {
        "every scheduled episode has exactly one outcome": not ledger["unaccounted"] and not ledger["received_twice"]
        and len(ledger["scheduled"]) == len(set(ledger["scheduled"])) and not ledger["crashed"],
        "no reward that the actions did not earn": not ledger["unexplained_rewards"],
        "nothing was learned from a broken environment": not ledger["learned_from_failure"],
        "the staleness stays within its bound": max(map(int, ledger["staleness"]), default=0) <= plan.max_staleness,
        "training ran to the end": not ledger["failure"] and ledger["updates"] > 0,
        "the gateway's memory is flat": is_flat([s["gateway_mb"] for s in books.samples if s["leased"]]),
    }  # fmt: skip
    if plan.restart_gateway_every:
        checks["there were restarts"] = bool(books.restarts)
        return checks
    created, ended = totals["sessions_created_total"], totals["sessions_closed_total"]
    return checks | {
        "every session that was opened was closed by its client, none lost or forgotten": created == ended,
        "no held session was lost and no request failed": not books.replaced and not books.failures
        and not failed_requests and not ledger["failed_attempts"],
    }  # fmt: skip


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum in milliseconds."""
    ordered = sorted(seconds) or [0.0]
    return {
        "p50_ms": round(1000 * ordered[len(ordered) // 2], 1),
        "p99_ms": round(1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 1),
        "max_ms": round(1000 * ordered[-1], 1),
    }


def thirds(values: list[float]) -> list[float]:
    """Medians of the first, middle and last third."""
    size = max(1, len(values) // 3)
    parts = [values[:size], values[size : 2 * size] or values, values[-size:]]
    return [round(sorted(part)[len(part) // 2], 1) if part else 0.0 for part in parts]


def is_flat(values: list[float]) -> bool:
    """Whether the last third is at most 10 % and 10 MB above the first; too few samples say nothing."""
    first, _, last = thirds(values)
    return len(values) < 12 or last <= 1.1 * first + 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in asdict(Plan()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--dry", action="store_true", help="write nothing")
    parser.add_argument("--report", action="store_true", help="only write the report of the results that exist")
    options = vars(parser.parse_args())
    dry, report = options.pop("dry"), options.pop("report")
    if report:
        write_report()
        return 0
    plan, machine = Plan(**options), facts()
    found = {"machine": machine, **asyncio.run(run_load(plan)), "load_at_end": load()}
    print(json.dumps({key: value for key, value in found.items() if key != "samples"}, indent=1))
    if not dry:
        update_results(plan.section, found)
        write_report()
    return int(not all(found["checks"].values()))


if __name__ == "__main__":
    sys.exit(main())
