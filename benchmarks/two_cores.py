"""What a second core is worth: training on one core and on two, beside the environment alone, in turns.

For five environments: the environment stepped by a plain loop on one core (the bound of anything that acts on one
core), ours on one core (collecting and learning alternate) and ours on two (a collector process acts while the learner
learns), with speed, processor time and final score over seeds. Then environments divided between two processes, and
compiled CartPole beside PureJaxRL if `--purejaxrl` names its folder and `--jax-python` an interpreter with JAX.

    python -m benchmarks.two_cores                      at most twelve minutes; writes results/two_cores.json and .md
    python -m benchmarks.two_cores --quick --print      does everything still run?
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders.two_cores import TASKS
from benchmarks.learning import interval
from benchmarks.machine import facts

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIVE = ("cartpole", "pendulum", "acrobot", "lunarlander", "halfcheetah")
MODES = {"alone": "environment alone", "one": "ours, one core", "two": "ours, two cores"}
DIVIDED = ("LunarLander-v3", "HalfCheetah-v5")


class Runner:
    """Starts contenders as processes, one at a time, and keeps what they print."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows: list[dict[str, Any]] = []
        """Every measurement, with its lane."""
        self._until = time.monotonic() + options.minutes * 60
        self._longest = 0.0

    def has_time_for(self, began: float) -> bool:
        """Whether another round as long as the longest so far fits into the time; `began`: start of the last."""
        self._longest = max(self._longest, time.monotonic() - began)
        return bool(time.monotonic() + self._longest < self._until)

    def run(self, lane: str, command: list[str], *, cores: int) -> None:
        """Run a contender on one core or on two, and keep its lines."""
        pinned = ["taskset", "-c", "0"] if cores == 1 else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(
            [*pinned, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        for line in lines:
            row = {"lane": lane, "cores": cores, **json.loads(line)}
            self.rows.append(row)
            score = f", score {row['score']:.1f}" if "score" in row else ""
            print(f"{row['task']:<12} {lane:<10} {row['steps_per_second']:>9,.0f} steps/s{score}", flush=True)

    def ours(self, task: str, lane: str, mode: str, seed: int, *, cores: int) -> None:
        """Run one of our modes."""
        command = [sys.executable, "-m", "benchmarks.contenders.two_cores", task, "--mode", mode, "--seed", str(seed)]
        scale = ["--scale", str(self.options.scale), "--seconds", str(self.options.seconds)]
        self.run(lane, command + scale, cores=cores)


def run_rounds(runner: Runner) -> None:
    """All contenders in turns, one seed a round, until the rounds or the minutes are used up."""
    options = runner.options
    for seed in range(1, options.rounds + 1):
        began = time.monotonic()
        for task in options.only or FIVE:
            runner.ours(task, "alone", "alone", seed, cores=1)
            runner.ours(task, "one", "synchronous", seed, cores=1)
            runner.ours(task, "two", "asynchronous", seed, cores=2)
        if not options.only:
            runner.ours("compiled", "two_synchronous", "synchronous", seed, cores=2)
            runner.ours("compiled", "two", "asynchronous", seed, cores=2)
            if options.purejaxrl and options.jax_python:
                script = ["-m", "benchmarks.contenders.purejaxrl", "--source", str(options.purejaxrl)]
                steps = round(TASKS["compiled"].steps * options.scale)
                command = [str(options.jax_python), *script, "--steps", str(steps), "--seed", str(seed)]
                runner.run("purejaxrl", command, cores=2)
        write(runner)
        if not runner.has_time_for(began):
            break


def divided_rows(rounds: int) -> list[dict[str, Any]]:
    """Stepping in one process beside two, for environments whose steps take tens of microseconds."""
    from benchmarks.workers import BLOCK_S, compare_configs
    from palaestra.env.make import EnvConfig

    rows = []
    for name in DIVIDED:
        configs = {
            "one": EnvConfig(id=name, num_envs=16, vectorization="in_process"),
            "two": EnvConfig(id=name, num_envs=16, vectorization="workers", num_workers=2),
        }
        rows.append({"env": name, "num_envs": 16, **compare_configs(configs, rounds, BLOCK_S)})
    return rows


def best(rows: list[dict[str, Any]], task: str, lane: str) -> float:
    """Steps per second of the best round: what free cores give."""
    rates = [row["steps_per_second"] for row in rows if (row["task"], row["lane"]) == (task, lane)]
    return max(rates, default=float("nan"))


def scores(rows: list[dict[str, Any]], task: str, lane: str) -> str:
    """Mean and interval of the final score."""
    found = [row["score"] for row in rows if (row["task"], row["lane"]) == (task, lane) and "score" in row]
    if len(found) < 2:
        return f"{found[0]:.1f}" if found else "-"
    mean, half = interval(found)
    return f"{mean:.1f} ± {half:.1f}"


def lowest(rows: list[dict[str, Any]], task: str, lane: str, key: str) -> float:
    """The lowest value over rounds, for times."""
    return min((row[key] for row in rows if (row["task"], row["lane"]) == (task, lane)), default=float("nan"))


def markdown(found: dict[str, Any]) -> str:
    """The tables of the documentation."""
    rows, about = found["rows"], found["machine"]
    seeds = max((row["seed"] for row in rows), default=0)
    lines = [
        "<!-- written by `python -m benchmarks.two_cores`; edit benchmarks/two_cores.py instead -->",
        "",
        f"Measured on {about['date']}: {about['processor']}, {about['cores']} cores, Python {about['python']}, load "
        f"{about['load_at_start']} before the start. Every contender is a process of its own; they take turns, one "
        f"seed a round, {seeds} rounds. *Alone* steps the environments in a plain loop with actions drawn beforehand, "
        "pinned to one core. *One core*: collecting and learning alternate, pinned to the same core. *Two cores*: "
        "`collection: asynchronous`, `collector: process`, weights at most one update old. Speed is that of the best "
        "round, after the first update. Scores are the mean return of the last hundred training episodes after the "
        "same number of steps, with the 95 % interval over seeds. *CPU* is processor time per step, of both processes.",
        "",
        "| environment | copies | alone | one core | two cores | two / alone | one: CPU | two: CPU | two: act | "
        "two: learn | score, one core | score, two cores |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in FIVE:
        task = TASKS[name]
        alone, one, two = (best(rows, name, lane) for lane in MODES)
        if not np.isfinite(alone):
            continue
        times = [lowest(rows, name, lane, "processor_us_per_step") for lane in ("one", "two")]
        times += [lowest(rows, name, "two", f"{side}_us_per_step") for side in ("collect", "learn")]
        lines.append(
            f"| {task.env_id} | {task.num_envs} | {alone:,.0f} | {one:,.0f} | {two:,.0f} | {two / alone:.0%} | "
            + " | ".join(f"{number:.1f} µs" for number in times)
            + f" | {scores(rows, name, 'one')} | {scores(rows, name, 'two')} |"
        )
    lines += ["", *_compiled_table(rows)]
    if found.get("divided"):
        lines += ["", "| stepping 16 copies | one process | two processes | ratio |", "| --- | ---: | ---: | ---: |"]
        for row in found["divided"]:
            one, two = row["one"]["best"], row["two"]["best"]
            lines.append(f"| {row['env']} | {one:,.0f} | {two:,.0f} | {two / one:.2f} |")
    return "\n".join(lines) + "\n"


def _compiled_table(rows: list[dict[str, Any]]) -> list[str]:
    contenders = {
        "two_synchronous": "ours, compiled/CartPole-v1, synchronous",
        "two": "ours, compiled/CartPole-v1, collector process",
        "purejaxrl": "PureJaxRL",
    }
    rival = best(rows, "compiled", "purejaxrl")
    lines = [
        "| compiled CartPole, two cores | steps/s | CPU | score | / PureJaxRL |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for lane, title in contenders.items():
        rate = best(rows, "compiled", lane)
        if np.isfinite(rate):
            processor = lowest(rows, "compiled", lane, "processor_us_per_step")
            ratio = f"{rate / rival:.2f}" if np.isfinite(rival) else "-"
            lines.append(f"| {title} | {rate:,.0f} | {processor:.1f} µs | {scores(rows, 'compiled', lane)} | {ratio} |")
    return lines if len(lines) > 2 else []


def write(runner: Runner, divided: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Write what there is."""
    found = {"machine": runner.options.machine, "rows": runner.rows, "divided": divided or []}
    if not runner.options.print:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / "two_cores.json").write_text(json.dumps(found, indent=1) + "\n")
        (RESULTS / "two_cores.md").write_text(markdown(found))
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_cores", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5, help="most rounds, one seed each (5)")
    parser.add_argument("--minutes", type=float, default=11.0, help="start no round that would take longer (11)")
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of the environment alone (2)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of each training's steps (1)")
    parser.add_argument("--only", action="append", choices=FIVE, help="this environment (may be repeated)")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--purejaxrl", type=Path, help="folder with PureJaxRL's ppo.py and wrappers.py")
    parser.add_argument("--jax-python", type=Path, help="interpreter of an environment with JAX and gymnax below 1.0")
    parser.add_argument("--print", action="store_true", help="write nothing")
    parser.add_argument("--render", action="store_true", help="only write the tables of the stored results again")
    options = parser.parse_args()
    if options.render:
        found = json.loads((RESULTS / "two_cores.json").read_text())
        (RESULTS / "two_cores.md").write_text(markdown(found))
        return
    options.machine = facts()
    if options.quick:
        options.rounds, options.scale, options.seconds = 1, 0.05, 0.5
    runner = Runner(options)
    run_rounds(runner)
    found = write(runner, divided_rows(10 if options.quick else 60))
    print(markdown(found))


if __name__ == "__main__":
    main()
