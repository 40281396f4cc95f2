"""Throughput of 1, 2, 4 … actors against the ideal line, with pages that take a fixed time.

    python -m benchmarks.load_scaling [--actors 1 2 4 8 16 32 64 128] [--seconds 10] [--latency 0.25]

Actors are those of training (`ActorPool`, `TaskRunner`, `GatewayClient`), with a script instead of a model: each
episode opens a session through the gateway, resets it, acts four times and closes it. A page answers a reset or an act
after `--latency` seconds without using a processor, as a page in a cluster or an inference server would. The ideal is n
times the throughput of one actor. Processor time per act says which process would end the line. Writes the section
`scaling` of benchmarks/results/load.json, and docs/images/load.png.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.load_processes import TOKEN, cpu_seconds, running_gateways
from benchmarks.load_report import RESULTS, write_report
from benchmarks.machine import facts, load
from palaestra.actor.agent import ScriptedAgent
from palaestra.actor.pool import ActorPool
from palaestra.actor.task_runner import EpisodeRequest, TaskRunner
from palaestra.errors import SessionFailed
from palaestra.experience.trajectory import Outcome, Trajectory
from palaestra.processes.procfs import list_descendants
from palaestra.sessions.action import Click, Move, Point, UiAction
from palaestra.sessions.clients.client import GatewayClient
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.task import TaskRequest, TaskSpec

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "load.png"
ACTS = 4
"""Acts of an episode."""
WARM_UP_S = 2.0


async def measure(actors: int, url: str, pids: dict[str, set[int]], seconds: float) -> dict[str, Any]:
    """Acts per second of this many actors, and processor time per act."""
    acts, outcomes, numbers = 0, [], itertools.count()

    async def script(spec: TaskSpec, screen: Screenshot, count: int) -> UiAction:
        nonlocal acts
        acts += count > 0  # the act before this reply was performed
        if count < ACTS - 1:
            return Move(Point(count, 5))
        return Click(Point(spec.seed * 37 % 120 + 20, spec.seed * 53 % 170 + 20))

    def deliver(request: EpisodeRequest, trajectory: Trajectory) -> None:
        nonlocal acts
        acts += trajectory.outcome is not Outcome.ENVIRONMENT_FAILED
        outcomes.append(trajectory.outcome)

    client = GatewayClient(url, token=TOKEN)
    runner, end = TaskRunner(client.open, ScriptedAgent(script)), time.monotonic() + WARM_UP_S + seconds

    def next_request() -> EpisodeRequest | None:
        number = next(numbers)
        task = TaskRequest("fake/button", number, {"step_limit": 10})
        return None if time.monotonic() > end else EpisodeRequest(f"e{number}", task, seed=number)

    pool = ActorPool(
        runner.run_episode, next_request=next_request, free_slots=lambda running: actors - running, deliver=deliver
    )
    running = asyncio.create_task(pool.run())
    try:
        await asyncio.sleep(WARM_UP_S)
        acts_before, began = acts, time.monotonic()
        cpu_before = {name: sum(map(cpu_seconds, own)) for name, own in pids.items()}
        await asyncio.sleep(seconds)
        took, acted = time.monotonic() - began, acts - acts_before
        cpu = {name: sum(map(cpu_seconds, own)) - cpu_before[name] for name, own in pids.items()}
        await running
    finally:
        await client.close()
    wrong = [outcome for outcome in outcomes if outcome is not Outcome.SUCCESS]
    if wrong:
        raise SessionFailed(
            "load", f"{len(wrong)} of {len(outcomes)} episodes ended otherwise than foretold: {wrong[:3]}"
        )
    return {
        "actors": actors, "acts_per_second": round(acted / took, 2), "episodes": len(outcomes), "load": load(),
        "cpu_ms_per_act": {name: round(1000 * used / max(1, acted), 2) for name, used in cpu.items()},
        "cores_used": round(sum(cpu.values()) / took, 2),
    }  # fmt: skip


async def run_scaling(numbers: list[int], seconds: float, latency_s: float) -> dict[str, Any]:
    """One gateway with two session servers, and all numbers of actors one after the other."""
    with tempfile.TemporaryDirectory(prefix="palaestra-load-") as directory:
        gateways = running_gateways(1, Path(directory), limit=max(numbers) + 8, servers=2, latency_s=latency_s)
        async with gateways as (gateway,):
            warm = GatewayClient(gateway.url, token=TOKEN)
            await warm.open()  # the servers run once a session is open
            await warm.close()
            pids = {
                "actors": {os.getpid()},
                "gateway": {gateway.pid},
                "session servers": set(list_descendants(gateway.pid)),
            }
            lines = []
            for actors in numbers:
                lines.append(await measure(actors, gateway.url, pids, seconds))
                print(json.dumps(lines[-1]), flush=True)
    base = lines[0]["acts_per_second"] / lines[0]["actors"]
    for line in lines:
        line["share_of_ideal"] = round(line["acts_per_second"] / (base * line["actors"]), 3)
    return {"latency_s": latency_s, "acts_per_episode": ACTS, "seconds": seconds, "lines": lines}


def draw(scaling: dict[str, Any], picture: Path = PICTURE) -> None:
    """Acts per second against actors, both logarithmic, with the ideal line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lines = scaling["lines"]
    actors = [line["actors"] for line in lines]
    measured = [line["acts_per_second"] for line in lines]
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    axes.plot(actors, [measured[0] / actors[0] * count for count in actors], "--", color="#7f8c8d", label="ideal")
    axes.plot(actors, measured, "o-", color="#2980b9", label="measured")
    for line in lines:
        shown = f"{100 * line['share_of_ideal']:.0f} %"
        place = (line["actors"], line["acts_per_second"])
        axes.annotate(shown, place, textcoords="offset points", xytext=(6, -12), fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(actors, [str(count) for count in actors])
    axes.set_yticks(
        ticks := [2**power for power in range(1, 10) if 2**power < 2 * max(measured)], [str(t) for t in ticks]
    )
    axes.set_xlabel("actors")
    axes.set_ylabel("acts per second")
    axes.set_title(f"One gateway, pages of {1000 * scaling['latency_s']:.0f} ms, two cores for everything", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def update_results(section: str, found: dict[str, Any]) -> None:
    """Replace one section of the results."""
    file = RESULTS / "load.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    results[section] = found
    file.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--latency", type=float, default=0.25)
    parser.add_argument("--dry", action="store_true", help="write nothing")
    options = parser.parse_args()
    machine = facts()
    found = {"machine": machine, **asyncio.run(run_scaling(options.actors, options.seconds, options.latency))}
    if not options.dry:
        update_results("scaling", found)
        write_report()
        draw(found)


if __name__ == "__main__":
    main()
