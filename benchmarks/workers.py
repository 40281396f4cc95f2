"""Environments in one process beside environments shared out over processes, in turns, as ratios.

    python -m benchmarks.workers                      about three minutes; writes benchmarks/results/workers.json
    python -m benchmarks.workers --rounds 10 --print  quick, nothing is written

Each contender steps for short blocks, one after the other, for many rounds. *median* is over all blocks: what this
machine gives under its current load. *best* is the best block: what free cores give.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from benchmarks.machine import facts
from palaestra.env.make import EnvConfig, make_env
from palaestra.env.spaces import allocate_row, random_actions
from palaestra.env.toy import Countdown
from palaestra.env.vector import VectorEnv

RESULTS = Path(__file__).parent / "results" / "workers.json"
COMPUTING = [(name, n) for name in ("LunarLander-v3", "HalfCheetah-v5", "CartPole-v1") for n in (8, 16, 64)]
BLOCK_S = 0.02


class Waiting(Countdown):
    """Waits 37 ms in every step."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Wait, then step."""
        time.sleep(0.037)
        return super().step(action)


class Contender:
    """One way of stepping, with what it needs to step on."""

    def __init__(self, env: VectorEnv) -> None:
        self.env = env
        self._row = allocate_row(env.observation_space, env.num_envs, env.mask_size)
        rng = np.random.default_rng(0)
        self._actions = [random_actions(env.action_space, env.num_envs, rng) for _ in range(64)]
        env.reset(0, self._row)
        self.rates: list[float] = []

    def block(self, seconds: float) -> None:
        """Step for a while and note the rate in environment steps per second."""
        step, row, actions, count = self.env.step, self._row, self._actions, 0
        for action in actions[:3]:
            step(action, row)
        began = now = time.perf_counter()
        while now - began < seconds:
            step(actions[count & 63], row)
            count += 1
            now = time.perf_counter()
        self.rates.append(count * self.env.num_envs / (now - began))


def compare_configs(configs: dict[str, EnvConfig], rounds: int, block_s: float) -> dict[str, dict[str, float]]:
    """Rates of every configuration, measured in turns."""
    contenders = {name: Contender(make_env(config)) for name, config in configs.items()}
    try:
        for _ in range(rounds):
            for contender in contenders.values():
                contender.block(block_s)
    finally:
        for contender in contenders.values():
            contender.env.close()
    return {
        name: {"median": statistics.median(contender.rates), "best": max(contender.rates)}
        for name, contender in contenders.items()
    }


def measure_rows(rounds: int, processes: int) -> list[dict[str, Any]]:
    """Every row of the table."""
    rows = []
    for name, n in COMPUTING:
        if gymnasium.spec(name) is None:
            continue
        configs = {
            "one": EnvConfig(id=name, num_envs=n, vectorization="in_process"),
            "shared": EnvConfig(id=name, num_envs=n, vectorization="workers", num_workers=processes),
        }
        rows.append({"env": name, "num_envs": n, "processes": processes, **compare_configs(configs, rounds, BLOCK_S)})
    waiting = {
        "one": EnvConfig(id="benchmarks.workers:Waiting", num_envs=8, vectorization="in_process"),
        "shared": EnvConfig(id="benchmarks.workers:Waiting", num_envs=8),
    }
    rows.append(
        {"env": "waits 37 ms", "num_envs": 8, "processes": 8, **compare_configs(waiting, max(3, rounds // 10), 0.5)}
    )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| environment | copies | processes | one process, best | shared out, best | ratio, best | ratio, median |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        one, shared = row["one"], row["shared"]
        ratios = [f"{shared[kind] / one[kind]:.2f}" for kind in ("best", "median")]
        lines.append(
            f"| {row['env']} | {row['num_envs']} | {row['processes']} | {one['best']:,.0f} | {shared['best']:,.0f} | "
            + " | ".join(ratios)
            + " |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100, help="Blocks of each contender.")
    parser.add_argument("--processes", type=int, default=2, help="Processes that the environments are shared out over.")
    parser.add_argument("--print", action="store_true", help="Write nothing.")
    options = parser.parse_args()
    about = facts()
    rows = measure_rows(options.rounds, options.processes)
    print(table(rows))
    if not options.print:
        RESULTS.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
