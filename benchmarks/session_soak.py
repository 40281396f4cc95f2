"""Do UI sessions survive murder? Thousands of episodes through a real gateway, while browsers and servers are killed.

    python -m benchmarks.session_soak [--episodes 5000] [--concurrent 16] [--browser-every 200] [--server-every 1000]

Every episode has an outcome that is foretold, and must reach it exactly once: where the environment failed, it is
repeated in a new session. The gateway's own counts must agree with the players'. Afterwards nothing may be open on any
server, no browser may have more contexts than a fresh one, and after the gateway's end no process and no directory may
be left. Writes benchmarks/results/session_soak.{json,md}; fails when a check does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import machine, session_watch
from benchmarks.session_player import expected_outcome, play
from palaestra.errors import SessionFailed
from palaestra.gateway.config import TOKEN_VARIABLE
from palaestra.sessions.clients.client import GatewayClient

RESULTS = Path(__file__).parent / "results"
TOKEN = "soak-token-0123456789"


@dataclass(frozen=True)
class Plan:
    """How much, and how cruel."""

    episodes: int = 5000
    concurrent: int = 16
    browser_every: int = 200
    """Episodes after which a browser is killed."""
    server_every: int = 1000
    """Episodes after which a session server is killed."""
    servers: int = 2
    warm: int = 1
    sample_every_s: float = 5.0
    seed: int = 0


@dataclass
class Ledger:
    """What became of every episode, by the players' own books."""

    outcomes: dict[int, list[str]] = field(default_factory=dict)
    """Of each episode every end it came to; there should be one."""
    lost: Counter[str] = field(default_factory=Counter)
    """Attempts whose environment failed, by reason."""
    opened: int = 0
    not_opened: int = 0
    longest_s: float = 0.0


@dataclass
class Soak:
    """One run: the gateway, the players' books, the killer's and the watcher's."""

    plan: Plan
    gateway: asyncio.subprocess.Process
    client: GatewayClient
    ledger: Ledger = field(default_factory=Ledger)
    kills: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, float]] = field(default_factory=list)
    seen: set[tuple[int, int]] = field(default_factory=set)

    async def run(self) -> None:
        numbers, rng = itertools.count(), random.Random(self.plan.seed)
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.gather(*(self._player(numbers, rng) for _ in range(self.plan.concurrent)))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _player(self, numbers: itertools.count[int], rng: random.Random) -> None:
        while (episode := next(numbers)) < self.plan.episodes:
            begin = time.monotonic()
            while True:
                outcome = await self._attempt(episode)
                if outcome is not None:
                    break
            self.ledger.longest_s = max(self.ledger.longest_s, time.monotonic() - begin)
            self.ledger.outcomes.setdefault(episode, []).append(outcome)
            self._kill_when_due(sum(map(len, self.ledger.outcomes.values())), rng)

    async def _attempt(self, episode: int) -> str | None:
        """The result of the verifier; None if the session failed."""
        try:
            session = await self.client.open()
        except SessionFailed as failure:
            self.ledger.not_opened += 1
            self.ledger.lost[f"not opened: {failure.reason}"] += 1
            return None
        self.ledger.opened += 1
        try:
            return await play(session, episode)
        except SessionFailed as failure:
            self.ledger.lost[failure.reason] += 1
            return None
        finally:
            await session.close()

    def _kill_when_due(self, done: int, rng: random.Random) -> None:
        if done >= self.plan.episodes:
            return
        for kind, every in (("servers", self.plan.server_every), ("browsers", self.plan.browser_every)):
            if done % every == 0:
                found = self._see()
                victims = sorted(found.busy(kind, idle=FRESH_RENDERERS) or getattr(found, kind))
                if victims:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(rng.choice(victims), signal.SIGKILL)
                        self.kills[kind] += 1

    def _see(self) -> session_watch.Below:
        found = session_watch.look(self.gateway.pid)
        self.seen |= session_watch.identities({self.gateway.pid} | found.all())
        return found

    async def _watch(self) -> None:
        begin = time.monotonic()
        while True:
            found = self._see()
            chromium = found.browsers | found.renderers | found.rest
            sample = {"gateway": {self.gateway.pid}, "servers": found.servers | found.guards, "browsers": chromium}
            megabytes = {name: round(session_watch.memory_mb(pids), 1) for name, pids in sample.items()}
            self.samples.append({"at_s": round(time.monotonic() - begin, 1), **megabytes})
            await asyncio.sleep(self.plan.sample_every_s)


@contextlib.asynccontextmanager
async def start_gateway(plan: Plan, directory: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    settings = {
        "port": 0, "servers": plan.servers, "warm": plan.warm, "max_sessions": plan.concurrent,
        "state_dir": str(directory / "state"), "stop_with_stdin": True,
    }  # fmt: skip
    (directory / "tmp").mkdir()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "palaestra.gateway", *(f"{key}={json.dumps(value)}" for key, value in settings.items()),
        env={**os.environ, TOKEN_VARIABLE: TOKEN, "TMPDIR": str(directory / "tmp")},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield process, json.loads(await process.stdout.readline())["url"]
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
        process._transport.close()  # type: ignore[attr-defined]


async def counts(url: str) -> dict[str, int]:
    """The gateway's own totals."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.get(f"{url}/metrics") as answer:
        text = await answer.text()
    found = re.findall(r"^palaestra_gateway_(sessions_\w+_total|servers\{\S+\}) (\d+)$", text, re.MULTILINE)
    return {name: int(value) for name, value in found}


async def wait_until_settled(soak: Soak, url: str, within_s: float) -> session_watch.Below:
    """What runs once every server and every browser's reserve is back, and everything else is gone."""
    end = time.monotonic() + within_s
    while True:
        found = soak._see()
        # A browser that was killed is replaced when it is next needed, so one may be missing; a server may not.
        whole = (await counts(url))['servers{state="starting"}'] == 0
        if (whole and max(found.renderers_by_browser()) <= FRESH_RENDERERS) or time.monotonic() > end:
            return found
        await asyncio.sleep(0.2)


FRESH_RENDERERS = 2
"""Pages and contexts of an idle browser: its first page and one spare context."""


async def run_soak(plan: Plan) -> dict[str, Any]:
    """The whole of it, and the checks."""
    directory = Path(tempfile.mkdtemp(prefix="palaestra-soak-"))
    begin = time.monotonic()
    try:
        async with start_gateway(plan, directory) as (gateway, url):
            soak = Soak(plan, gateway, GatewayClient(url, token=TOKEN, rng=random.Random(plan.seed)))
            try:
                await soak.run()
                took = time.monotonic() - begin
                found = await wait_until_settled(soak, url, 60.0)
                still_open = [name for server in found.servers for name in session_watch.sessions_on(server)]
                totals = await counts(url)
            finally:
                await soak.client.close()
            profiles = sorted(path.name.split("-")[1] for path in directory.glob("state/*/*/*"))
            gateway.terminate()
            code = await gateway.wait()
        left = session_watch.living(soak.seen)
        litter = [
            str(path.relative_to(directory)) for name in ("state", "tmp") for path in (directory / name).rglob("*")
        ]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    facts = {
        "plan": asdict(plan), "seconds": round(took, 1), "episodes_per_second": round(plan.episodes / took, 2),
        "outcomes": dict(Counter(end for ends in soak.ledger.outcomes.values() for end in ends)),
        "environment_failed": dict(soak.ledger.lost), "opened": soak.ledger.opened, "kills": dict(soak.kills),
        "longest_episode_s": round(soak.ledger.longest_s, 1), "gateway_says": totals,
        "memory_mb": thirds(soak.samples), "samples": soak.samples,
        "renderers_of_idle_browsers": found.renderers_by_browser(), "processes_seen": len(soak.seen),
    }  # fmt: skip
    checks = {
        "every episode came to exactly one end, the one foretold": _has_all_outcomes(soak.ledger, plan),
        "the gateway opened as many sessions as the players were given": totals["sessions_created_total"]
        == soak.ledger.opened,
        "each was closed by its player or lost with its server, none forgotten": totals["sessions_reaped_total"] == 0
        and totals["sessions_closed_total"] + totals["sessions_lost_total"] >= soak.ledger.opened,
        "every kill that was due was made": soak.kills == due(plan),
        "no session is open on any server": not still_open,
        "no browser has a context too many": max(found.renderers_by_browser()) <= FRESH_RENDERERS,
        "no server has more than one browser's directory": len(profiles) <= plan.servers + plan.warm
        and set(profiles) == {"chromium"},
        "the gateway ended in order": code == 0,
        "no process is left": not left,
        "no file or directory is left": not litter,
    }
    if len(soak.samples) >= 30:
        checks["memory is flat"] = flat(facts["memory_mb"])
    return facts | {"checks": checks, "failed_checks": [name for name, passed in checks.items() if not passed]}


def _has_all_outcomes(ledger: Ledger, plan: Plan) -> bool:
    return ledger.outcomes == {episode: [expected_outcome(episode)] for episode in range(plan.episodes)}


def due(plan: Plan) -> Counter[str]:
    """Kills by kind; none after the last episode."""
    last = plan.episodes - 1
    return +Counter({"browsers": last // plan.browser_every, "servers": last // plan.server_every})


def thirds(samples: list[dict[str, float]]) -> dict[str, list[float]]:
    """Medians of the first, middle and last third, without the first tenth, in which browsers fill their caches."""
    kept = samples[len(samples) // 10 :]
    size = max(1, len(kept) // 3)
    parts = [kept[:size], kept[size : 2 * size] or kept, kept[-size:]]
    return {
        name: [round(statistics.median(sample[name] for sample in part), 1) for part in parts]
        for name in ("gateway", "servers", "browsers")
    }


def flat(memory: dict[str, list[float]]) -> bool:
    """Whether no process grew by more than 10 % and 10 MB from the first third to the last."""
    return all(last <= first * 1.1 + 10 for first, _, last in memory.values())


def markdown(found: dict[str, Any]) -> str:
    plan, memory, host = found["plan"], found["memory_mb"], found["machine"]
    failures = sum(found["environment_failed"].values())
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(found["environment_failed"].items()))
    lines = [
        "<!-- written by `python -m benchmarks.session_soak` -->", "",
        "| episodes | at once | browsers killed | servers killed | solved | failed as foretold | attempts lost and "
        "repeated | minutes | episodes/s | longest episode |", "| ---: " * 10 + "|",
        f"| {plan['episodes']:,} | {plan['concurrent']} | {found['kills'].get('browsers', 0)} "
        f"| {found['kills'].get('servers', 0)} | {found['outcomes'].get('solved', 0):,} "
        f"| {found['outcomes'].get('failed', 0):,} | {failures} ({reasons}) | {found['seconds'] / 60:.1f} "
        f"| {found['episodes_per_second']} | {found['longest_episode_s']} s |", "",
        "| memory (PSS, MB) | first third | middle | last |", "| --- | ---: | ---: | ---: |",
        *(f"| {name} | {' | '.join(f'{part:.0f}' for part in parts)} |" for name, parts in memory.items()), "",
        *(f"- {'yes' if passed else '**NO**'}: {name}" for name, passed in found["checks"].items()), "",
        f"{host['processor']}, {host['cores']} cores, load {host['load_at_start']} before and {found['load_at_end']} "
        f"after; {host['date']}.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("episodes", "concurrent", "browser_every", "server_every", "servers", "warm", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Plan, name))
    parser.add_argument("--dry", action="store_true", help="write nothing")
    options = vars(parser.parse_args())
    dry = options.pop("dry")
    facts = machine.facts()
    found = {"machine": facts, **asyncio.run(run_soak(Plan(**options))), "load_at_end": machine.load()}
    print(markdown(found))
    if not dry:
        (RESULTS / "session_soak.json").write_text(json.dumps(found, indent=1) + "\n")
        (RESULTS / "session_soak.md").write_text(markdown(found))
    return int(bool(found["failed_checks"]))


if __name__ == "__main__":
    sys.exit(main())
