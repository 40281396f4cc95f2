"""How fast UI sessions are: opening one, and clicking and looking, beside what Chromium alone allows over raw CDP.

    python -m benchmarks.sessions [--rounds 5] [--seconds 3] [--agents 1 4 16] [--chromium PATH]

Contenders take turns, each with its own processes and browsers, started for the turn and ended after it:
raw CDP (`benchmarks.sessions_raw_cdp`), which takes the picture at once; the same with page time passing before it, as
sessions let it pass; `BrowserSession` in the player's process, session servers over HTTP, and the
gateway before them. All have as many browsers, one for a single agent, otherwise one per core. Every agent ticks the
same box of `miniwob/click-checkboxes` on and off, so that each picture must differ from the one before; one that does
not is stale, and ends the run. Writes benchmarks/results/sessions.{json,md}.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.gateway import TOKEN, TOKENS, Connection, child, quantiles_ms, request
from benchmarks.machine import facts, load
from benchmarks.processor import ProcessorTime
from benchmarks.sessions_report import markdown
from palaestra.sessions.action import Click, Point
from palaestra.sessions.browser.browser import Browser, SharedBrowser
from palaestra.sessions.browser.chromium import find_chromium
from palaestra.sessions.browser.page import Page
from palaestra.sessions.browser.session import BrowserSession
from palaestra.sessions.clients.client import SessionClient
from palaestra.sessions.suites import make_task
from palaestra.sessions.task import TaskRequest

RESULTS = Path(__file__).parent / "results"
TASK = "miniwob/click-checkboxes"
BOX = Point(15, 63)
SEED = 3
SERVER = (sys.executable, "-m", "palaestra.sessions.server", "--port", "0")
Act = Callable[[int], Awaitable[bytes]]
"""Performs the agent's act of this number and gives its picture."""


async def play(acts: list[Act], seconds: float) -> dict[str, Any]:
    """Every agent acts as fast as it can, until the time is over; a stale picture ends everything."""
    took: list[float] = []
    begin = time.perf_counter()
    end = begin + seconds

    async def agent(act: Act) -> None:
        before = b""
        number = 0
        while (task_request := time.perf_counter()) < end:
            number += 1
            picture = await act(number)
            if picture == before:
                raise SystemExit(f"act {number}: the picture is the one before it")
            before = picture
            took.append(time.perf_counter() - task_request)

    await asyncio.gather(*(agent(act) for act in acts))
    return {"steps": len(took), "seconds": time.perf_counter() - begin, "step_seconds": took}


def task_request(number: int) -> TaskRequest:
    return TaskRequest(TASK, SEED + number, {"step_limit": 10**9})


# ---------------------------------------------------------------------------- contenders


@contextlib.asynccontextmanager
async def children(
    module: str, agents: int, browsers: int, options: argparse.Namespace, *more: str
) -> AsyncIterator[Any]:
    """One process per browser, each with its share of the agents."""
    started = []
    for number in range(browsers):
        share = agents // browsers
        command = [sys.executable, "-m", module, TASK, "--pages", str(share), "--seed", str(SEED + number * share)]
        command += ["--seconds", str(options.seconds), "--points", json.dumps([[BOX.x, BOX.y]])]
        command += [*more, *(["--chromium", options.chromium] if options.chromium else [])]
        pipe = asyncio.subprocess.PIPE
        started.append(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 26))
    for process in started:
        assert (await process.stdout.readline()) == b"ready\n"

    async def go() -> dict[str, Any]:
        for process in started:
            process.stdin.write(b"go\n")
        found = [json.loads(await process.stdout.readline()) for process in started]
        return {
            "steps": sum(one["steps"] for one in found),
            "seconds": max(one["seconds"] for one in found),
            "step_seconds": [second for one in found for second in one["step_seconds"]],
        }

    try:
        yield go
    finally:
        for process in started:
            process.stdin.close()
            await process.wait()


def raw(agents: int, browsers: int, options: argparse.Namespace) -> Any:
    return children("benchmarks.sessions_raw_cdp", agents, browsers, options)


def raw_settled(agents: int, browsers: int, options: argparse.Namespace) -> Any:
    return children("benchmarks.sessions_raw_cdp", agents, browsers, options, "--settle")


def session(agents: int, browsers: int, options: argparse.Namespace) -> Any:
    return children("benchmarks.sessions_in_process", agents, browsers, options)


class Wired:
    """An agent at the other end of a connection that does as little as a client can."""

    def __init__(self, connection: Connection, prefix: str, token: str) -> None:
        self._connection, self._prefix, self._token = connection, prefix, token

    async def ask(self, method: str, what: str, document: Any = None, accept: str = "application/json") -> bytes:
        task_request = request(method, f"{self._prefix}/{what}", document, accept=accept, token=self._token)
        status, body = await self._connection.ask(task_request)
        if status not in (200, 201):
            raise SystemExit(f"{method} {what}: {status} {body[:300]!r}")
        return body

    async def act(self, number: int) -> bytes:
        action = {"kind": "click", "at": [BOX.x, BOX.y]}
        return await self.ask("POST", "act", {"step": number, "action": action}, accept="image/png")

    async def reset(self, number: int) -> None:
        wanted = task_request(number)
        await self.ask("POST", "reset", {"task": wanted.task, "seed": wanted.seed, "params": dict(wanted.params)})


def server_command(options: argparse.Namespace) -> list[str]:
    return [*SERVER, *(["--chromium", options.chromium] if options.chromium else [])]


@contextlib.asynccontextmanager
async def gateway_process(browsers: int, options: argparse.Namespace, **more: Any) -> AsyncIterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as state:
        settings = {"port": 0, "servers": browsers, "warm": 0, "state_dir": state, "max_sessions": 64, **more}
        settings["server_command"] = server_command(options)
        arguments = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        environment = TOKENS
        async with child(sys.executable, "-m", "palaestra.gateway", *arguments, **environment) as gate:
            await _all_ready(gate["port"], browsers)
            yield gate


async def _all_ready(port: int, servers: int) -> None:
    connection = await Connection.open(port)
    while (
        f'state="ready"}} {servers}\n'.encode()
        not in (await connection.ask(request("GET", "/metrics", token=TOKEN)))[1]
    ):
        await asyncio.sleep(0.05)
    await connection.close()


async def start_agents(ports: list[int], agents: int, *, gateway: bool) -> list[Wired]:
    """Agents with a session each, spread over the ports, its task begun."""
    wired = []
    for number in range(agents):
        port = ports[number % len(ports)]
        connection, token = await Connection.open(port), TOKEN if gateway else ""
        opening = request("POST", "/sessions", {"ttl_s": 60} if gateway else {}, token=token)
        status, body = await connection.ask(opening)
        assert status == 201, body
        prefix = f"/{'proxy' if gateway else 'sessions'}/{json.loads(body)['session_id']}"
        wired.append(Wired(connection, prefix, token))
    await asyncio.gather(*(agent.reset(number) for number, agent in enumerate(wired)))
    return wired


@contextlib.asynccontextmanager
async def session_servers(agents: int, browsers: int, options: argparse.Namespace) -> AsyncIterator[Any]:
    async with contextlib.AsyncExitStack() as stack:
        told = [await stack.enter_async_context(child(*server_command(options))) for _ in range(browsers)]
        wired = await start_agents([one["port"] for one in told], agents, gateway=False)
        yield lambda: play([agent.act for agent in wired], options.seconds)


@contextlib.asynccontextmanager
async def gateway(agents: int, browsers: int, options: argparse.Namespace) -> AsyncIterator[Any]:
    async with gateway_process(browsers, options) as gate:
        wired = await start_agents([gate["port"]], agents, gateway=True)
        yield lambda: play([agent.act for agent in wired], options.seconds)


@contextlib.asynccontextmanager
async def client(agents: int, browsers: int, options: argparse.Namespace) -> AsyncIterator[Any]:
    """The gateway as an actor uses it: with the client that checks, retries and renews."""
    async with gateway_process(browsers, options) as gate:
        wired = await start_agents([gate["port"]], agents, gateway=True)
        sessions = [SessionClient(f"http://127.0.0.1:{gate['port']}{one._prefix}", token=TOKEN) for one in wired]

        def act(one: SessionClient) -> Act:
            async def acted(number: int) -> bytes:
                return (await one.act(Click(BOX), step=number)).screenshot.data

            return acted

        yield lambda: play([act(one) for one in sessions], options.seconds)
        await asyncio.gather(*(one._client.close() for one in sessions))


CONTENDERS = {
    "raw": raw,
    "settled": raw_settled,
    "session": session,
    "server": session_servers,
    "gateway": gateway,
    "client": client,
}


async def steps_round(name: str, agents: int, options: argparse.Namespace) -> dict[str, Any]:
    browsers = min(agents, os.cpu_count() or 1)
    async with CONTENDERS[name](agents, browsers, options) as go:
        processor = ProcessorTime()
        found = await go()
        used = processor.read()
    steps = max(1, found["steps"])
    return {
        "contender": name, "agents": agents, "browsers": browsers, "steps": found["steps"],
        "steps_per_second": round(found["steps"] / found["seconds"], 1), "step": quantiles_ms(found["step_seconds"]),
        "browser_cpu_ms": round(1000 * used.browsers / steps, 2), "our_cpu_ms": round(1000 * used.ours / steps, 2),
        "others_share": round(used.others / (found["seconds"] * (os.cpu_count() or 1)), 3),
    }  # fmt: skip


# ---------------------------------------------------------------------------- opening a session


async def openings_in_process(number: int, task: str, options: argparse.Namespace) -> list[dict[str, float]]:
    shared = SharedBrowser(find_chromium(options.chromium))
    lines = []
    try:
        await shared.get()
        for count in range(number):
            begin = time.perf_counter()
            one = BrowserSession(shared.get)
            await one.reset(TaskRequest(task, count))
            reset = time.perf_counter()
            await one.screenshot()
            end = time.perf_counter()
            lines.append({"open": 0.0, "reset": reset - begin, "screenshot": end - reset, "all": end - begin})
            await one.close()
            lines[-1]["close"] = time.perf_counter() - end
            await asyncio.sleep(options.pause)
    finally:
        await shared.stop()
    return lines


async def openings_wired(port: int, number: int, task: str, options: argparse.Namespace, *, gateway: bool) -> Any:
    connection, token, lines = await Connection.open(port), TOKEN if gateway else "", []
    for count in range(number):
        begin = time.perf_counter()
        opening = request("POST", "/sessions", {"ttl_s": 60} if gateway else {}, token=token)
        status, body = await connection.ask(opening)
        assert status == 201, body
        opened = time.perf_counter()
        name = json.loads(body)["session_id"]
        one = Wired(connection, f"/{'proxy' if gateway else 'sessions'}/{name}", token)
        await one.ask("POST", "reset", {"task": task, "seed": count})
        reset = time.perf_counter()
        await one.ask("GET", "screenshot", accept="image/png")
        end = time.perf_counter()
        status, body = await connection.ask(request("DELETE", f"/sessions/{name}", token=token))
        assert status == 200, body
        lines.append({
            "open": opened - begin, "reset": reset - opened, "screenshot": end - reset, "all": end - begin,
            "close": time.perf_counter() - end,
        })  # fmt: skip
        await asyncio.sleep(options.pause)
    await connection.close()
    return lines


async def openings_round(task: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Sessions opened one after the other, the three ways in turn, in browsers that were used before."""
    number = options.openings
    found = {"session": await openings_in_process(number, task, options)}
    async with child(*server_command(options)) as server:
        found["server"] = await openings_wired(server["port"], number, task, options, gateway=False)
    async with gateway_process(1, options) as gate:
        found["gateway"] = await openings_wired(gate["port"], number, task, options, gateway=True)
    return [{"way": way, "task": task, "lines": lines[3:]} for way, lines in found.items()]


async def navigation(task: str, options: argparse.Namespace) -> list[float]:
    """How long the task's page itself takes to load, in a context that is there already."""
    suite, _, name = task.partition("/")
    seconds = []
    browser = await Browser.start(find_chromium(options.chromium))
    try:
        for seed in range(options.openings):
            made = make_task(suite, name, seed, {})
            page = Page(browser, await browser.open(made.screen), made.screen, made.serve, 10.0)
            begin = time.perf_counter()
            await page._prepare(seed, made.entry)
            seconds.append(time.perf_counter() - begin)
            await page.close()
            await asyncio.sleep(options.pause)
    finally:
        await browser.stop()
    return seconds[3:]


def summarize_openings(rounds: list[dict[str, Any]], task: str) -> list[dict[str, Any]]:
    told = []
    for way in ("session", "server", "gateway"):
        lines = [line for one in rounds if one["way"] == way and one["task"] == task for line in one["lines"]]
        told.append({
            "way": way, "task": task, "sessions": len(lines),
            **{part: quantiles_ms([line[part] for line in lines]) for part in lines[0]},
        })  # fmt: skip
    return told


# ---------------------------------------------------------------------------- all of it


def best_and_median(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per contender and number of agents; ratios to raw CDP are taken round by round, then their median."""
    told = []
    for agents in dict.fromkeys(one["agents"] for one in rounds):
        for name in dict.fromkeys(one["contender"] for one in rounds):
            mine = [one for one in rounds if (one["agents"], one["contender"]) == (agents, name)]
            if not mine:
                continue
            speeds = [one["steps_per_second"] for one in mine]
            best = max(mine, key=lambda one: one["steps_per_second"])
            told.append({
                "agents": agents, "contender": name, "browsers": best["browsers"], "rounds": len(mine),
                "median": statistics.median(speeds), "best": max(speeds),
                "p50": statistics.median(one["step"]["p50"] for one in mine),
                "p99": statistics.median(one["step"]["p99"] for one in mine),
                "browser_cpu_ms": min(one["browser_cpu_ms"] for one in mine),
                "our_cpu_ms": min(one["our_cpu_ms"] for one in mine),
                "others_share": statistics.median(one["others_share"] for one in mine),
                **{f"of_{base}": _ratio(rounds, mine, agents, base) for base in ("raw", "settled")},
            })  # fmt: skip
    return told


def _ratio(rounds: list[dict[str, Any]], mine: list[dict[str, Any]], agents: int, base: str) -> dict[str, float] | None:
    """Speed by the clock and by the processor as a share of another contender's; None if that one did not run."""
    bases = {one["round"]: one for one in rounds if (one["agents"], one["contender"]) == (agents, base)}
    if not bases:
        return None
    by_clock = [one["steps_per_second"] / bases[one["round"]]["steps_per_second"] for one in mine]
    by_processor = _cpu_ms(bases.values()) / _cpu_ms(mine)
    return {"clock": round(statistics.median(by_clock), 3), "processor": round(by_processor, 3)}


def _cpu_ms(rounds: Iterable[dict[str, Any]]) -> float:
    """CPU time per step, including browsers: the minimum over rounds, since other processes only add to it."""
    return min(one["browser_cpu_ms"] + one["our_cpu_ms"] for one in rounds)


async def run_benchmark(options: argparse.Namespace, report: Callable[[dict[str, Any]], None]) -> None:
    """Round after round; `report` is called with the results after each round."""
    machine, chromium = facts(), find_chromium(options.chromium).path
    openings: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    loads: dict[str, list[float]] = {}
    for number in range(options.rounds):
        for agents in options.agents:
            for name in options.contenders:
                line = {"round": number, **await steps_round(name, agents, options)}
                print(json.dumps(line), file=sys.stderr, flush=True)
                steps.append(line)
        for task in ("click_target/button", "miniwob/click-button") if options.openings else ():
            openings += await openings_round(task, options)
            loads.setdefault(task, []).extend(await navigation(task, options))
        report({
            "machine": machine, "chromium": chromium, "load_at_end": load(),
            "openings": [line for task in loads for line in summarize_openings(openings, task)],
            "navigation": {task: quantiles_ms(seconds) for task, seconds in loads.items()},
            "steps": best_and_median(steps), "rounds": steps,
        })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one turn")
    parser.add_argument("--agents", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--openings", type=int, default=25, help="sessions opened per way, task and round; 0: none")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two openings")
    parser.add_argument("--chromium", default=None, help="another browser, such as one that does not draw on demand")
    parser.add_argument("--name", default="sessions", help="of the files of results")
    parser.add_argument("--dry", action="store_true", help="print the tables and write nothing")
    options = parser.parse_args()

    def report(result: dict[str, Any]) -> None:
        if not options.dry:
            (RESULTS / f"{options.name}.json").write_text(json.dumps(result, indent=1) + "\n")
            (RESULTS / f"{options.name}.md").write_text(markdown(result))
        print(markdown(result), flush=True)

    asyncio.run(run_benchmark(options, report))


if __name__ == "__main__":
    main()
