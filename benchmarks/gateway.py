"""What the gateway costs: the same requests straight to a session server and through the gateway, in turns, in one run.

    python -m benchmarks.gateway [--requests 4000] [--concurrency 1]

A session of `FakeSession` answers, so that what is compared is the way and not the page. Every request through the
gateway follows one to the server itself, on connections that stay open, from one client; the overhead is the difference
of the two distributions' quantiles. Writes benchmarks/results/gateway.{json,md}.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httptools

from benchmarks.machine import facts, load
from palaestra.gateway.config import OPERATOR_TOKEN_VARIABLE, TOKEN_VARIABLE
from palaestra.sessions.wire import SESSION_TOKEN_HEADER

RESULTS = Path(__file__).parent / "results"
FAKE = [sys.executable, "-m", "palaestra.sessions.server", "--port", "0", "--fake"]
TOKEN = "benchmark-token-0123456789"
TOKENS = {TOKEN_VARIABLE: "clients-token-0123456789", OPERATOR_TOKEN_VARIABLE: TOKEN}
"""The operator's token is used throughout: it needs no token of the session beside it."""
QUANTILES = (0.5, 0.9, 0.99)


class Connection:
    """One kept-open connection that asks one thing at a time; as little of a client as there can be."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 20))

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        self._writer.write(request)
        answer = _Answer()
        parser = httptools.HttpResponseParser(answer)
        while not answer.complete:
            parser.feed_data(await self._reader.read(1 << 18))
        return parser.get_status_code(), b"".join(answer.pieces)

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


class _Answer:
    def __init__(self) -> None:
        self.complete, self.pieces = False, []

    def on_body(self, piece: bytes) -> None:
        self.pieces.append(piece)

    def on_message_complete(self) -> None:
        self.complete = True


def request(
    method: str, path: str, document: Any = None, *, accept: str = "application/json", token: str = "",
    session_token: str = "",
) -> bytes:  # fmt: skip
    body = b"" if document is None else json.dumps(document).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Accept: {accept}"]
    if token:
        lines.append(f"Authorization: Bearer {token}")
    if session_token:
        lines.append(f"{SESSION_TOKEN_HEADER}: {session_token}")
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextlib.asynccontextmanager
async def child(*command: str, **environment: str) -> AsyncIterator[dict[str, Any]]:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, **environment}
    )
    assert process.stdout is not None
    try:
        yield json.loads(await process.stdout.readline())
    finally:
        process.terminate()
        await process.wait()


class Way:
    """One way to a session: the requests of one step of an agent, and how long each took."""

    def __init__(self, name: str, port: int, session_id: str, prefix: str, token: str) -> None:
        self.name, self._port, self._id, self._prefix, self._token = name, port, session_id, prefix, token
        self.seconds: dict[str, list[float]] = {"progress": [], "act": [], "screenshot": []}
        self._step = 0

    async def begin(self) -> None:
        self._connection = await Connection.open(self._port)
        await self._reset()

    async def _reset(self) -> None:
        asked = {"task": "fake/button", "seed": 3, "params": {"step_limit": 1_000_000}}
        status, body = await self._ask("POST", "reset", asked)
        assert status == 200, body

    async def step(self, *, keep: bool) -> None:
        self._step += 1
        act = {"step": self._step, "action": {"kind": "move", "at": [1, 2]}}
        for what, method, document, accept in (
            ("act", "POST", act, "image/png"), ("progress", "GET", None, "application/json"),
            ("screenshot", "GET", None, "image/png"),
        ):  # fmt: skip
            begin = time.perf_counter()
            status, body = await self._ask(method, what, document, accept=accept)
            took = time.perf_counter() - begin
            assert status == 200, body
            if keep:
                self.seconds[what].append(took)

    async def _ask(self, method: str, what: str, document: Any, accept: str = "application/json") -> tuple[int, bytes]:
        path = f"{self._prefix}/{self._id}/{what}"
        return await self._connection.ask(request(method, path, document, accept=accept, token=self._token))


def quantiles_ms(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        f"p{int(q * 100)}": round(1000 * ordered[min(len(ordered) - 1, int(q * len(ordered)))], 3) for q in QUANTILES
    }


async def open_session(port: int, *, token: str = "") -> str:
    connection = await Connection.open(port)
    status, body = await connection.ask(request("POST", "/sessions", {} if not token else {"ttl_s": 60}, token=token))
    assert status == 201, body
    await connection.close()
    return str(json.loads(body)["session_id"])


async def compare(server_port: int, gateway_port: int, *, steps: int, concurrency: int) -> dict[str, Any]:
    """Steps straight and through the gateway, in turns; at a concurrency of n, n agents at once on either way."""
    straight = [
        Way("straight", server_port, await open_session(server_port), "/sessions", "") for _ in range(concurrency)
    ]
    through = [
        Way("through", gateway_port, await open_session(gateway_port, token=TOKEN), "/proxy", TOKEN)
        for _ in range(concurrency)
    ]
    await asyncio.gather(*(way.begin() for way in (*straight, *through)))
    for number in range(steps // concurrency + 50):
        for ways in (straight, through):
            await asyncio.gather(*(way.step(keep=number >= 50) for way in ways))
    line: dict[str, Any] = {"concurrency": concurrency, "steps": steps, "requests": {}}
    for what in (*straight[0].seconds, "all"):
        found = {}
        for name, ways in (("straight", straight), ("through", through)):
            kinds = straight[0].seconds if what == "all" else (what,)
            found[name] = quantiles_ms([second for way in ways for kind in kinds for second in way.seconds[kind]])
        overhead = {key: round(found["through"][key] - found["straight"][key], 3) for key in found["through"]}
        line["requests"][what] = {**found, "overhead": overhead}
    return line


async def openings(gateway_port: int, number: int) -> dict[str, Any]:
    """Sessions opened and closed one after the other."""
    connection, seconds = await Connection.open(gateway_port), []
    begin = time.perf_counter()
    for _ in range(number):
        asked = time.perf_counter()
        status, body = await connection.ask(request("POST", "/sessions", {"ttl_s": 60}, token=TOKEN))
        assert status == 201, body
        seconds.append(time.perf_counter() - asked)
        closing = request("DELETE", f"/sessions/{json.loads(body)['session_id']}", token=TOKEN)
        assert (await connection.ask(closing))[0] == 200
    took = time.perf_counter() - begin
    return {"openings": number, "open": quantiles_ms(seconds), "open_and_close_per_second": round(number / took, 1)}


def markdown(result: dict[str, Any]) -> str:
    rows = ["| at once | request | straight p50 / p99 | through p50 / p99 | overhead p50 | p90 | p99 |",
            "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for line in result["lines"]:
        for what, found in line["requests"].items():
            straight, through, over = found["straight"], found["through"], found["overhead"]
            rows.append(
                f"| {line['concurrency']} | {what} | {straight['p50']} / {straight['p99']} | {through['p50']} / "
                f"{through['p99']} | **{over['p50']}** | {over['p90']} | **{over['p99']}** |"
            )
    openings, machine = result["openings"], result["machine"]
    return "\n".join([
        "<!-- written by `python -m benchmarks.gateway` -->", "",
        "Milliseconds; a session server with `FakeSession` behind it, asked straight and through the gateway in turns.",
        "", *rows, "",
        f"Opening a session through the gateway: p50 {openings['open']['p50']} ms, p99 {openings['open']['p99']} ms; "
        f"{openings['open_and_close_per_second']} opened and closed per second, one after the other.",
        "", f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}, {result['loop']}, "
        f"load {machine['load_at_start']} before and {result['load_at_end']} after; {machine['date']}.",
        "",
    ])  # fmt: skip


async def run_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    machine = facts()
    with tempfile.TemporaryDirectory() as state:
        settings = ["port=0", "servers=1", "warm=0", f"state_dir={state}", f"server_command={json.dumps(FAKE)}"]
        gateway = child(sys.executable, "-m", "palaestra.gateway", *settings, **TOKENS)
        async with child(*FAKE) as server, gateway as gate:
            lines = [
                await compare(server["port"], gate["port"], steps=options.steps, concurrency=concurrency)
                for concurrency in options.concurrency
            ]
            opening = await openings(gate["port"], options.openings)
    try:
        import uvloop  # noqa: F401

        loop = "uvloop"
    except ImportError:
        loop = "asyncio"
    return {"machine": machine, "loop": loop, "lines": lines, "openings": opening, "load_at_end": load()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000, help="steps of three requests each, either way")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4], help="agents at once")
    parser.add_argument("--openings", type=int, default=300)
    parser.add_argument("--dry", action="store_true", help="print the tables and write nothing")
    options = parser.parse_args()
    result = asyncio.run(run_benchmark(options))
    if not options.dry:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "gateway.json").write_text(json.dumps(result, indent=2) + "\n")
        (RESULTS / "gateway.md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
