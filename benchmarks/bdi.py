"""BDI agents beside native Q-learning: episodes to a threshold, and recovery when the goal moves.

Both use the same update (`palaestra/kernels/tabular.py`), learning rate, discount, initial values and schedule of
epsilon. The plans know more: docs/bdi.md says what. Writes `results/bdi.json` (every episode of every seed, after every
run), `results/bdi.md` (the table) and `docs/images/bdi.png`. Run it as `python -m benchmarks.bdi`; a run that is stored
is not repeated unless `--again` is given.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt
from palaestra.intervals import confidence_interval
from palaestra.runs.runner import AttemptPaths, Machine
from palaestra.runs.runners.spade_bdi import SpadeBdiRunner
from palaestra.runs.spec import RunSpec
from palaestra.train import config_from, train

ROOT = Path(__file__).parents[1]
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
AGENTS = ("bdi", "q_learning")
NAMES = {"bdi": "BDI", "q_learning": "Q-learning"}
COLOURS = {"bdi": "#1976d2", "q_learning": "#ef6c00"}


@dataclass(frozen=True)
class Experiment:
    """One environment, with settings that both agents share."""

    title: str
    env_id: str
    threshold: float
    window: int
    """Episodes whose mean return has to reach the threshold."""
    episodes: int
    """Episodes of a BDI run."""
    steps: int
    """Steps of a Q-learning run."""
    learning_rate: float
    discount: float
    initial_value: float
    epsilon: tuple[float, float, int]
    """Start, end, and steps in between."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    max_episode_steps: int | None = None
    change: int = 0
    """Episode from which the goal is elsewhere; the threshold counts from there."""


EXPERIMENTS = {
    "frozen_lake": Experiment(
        title="FrozenLake 8x8, slippery",
        env_id="FrozenLake8x8-v1",
        threshold=0.6,
        window=100,
        episodes=1200,
        steps=160_000,
        learning_rate=0.1,
        discount=0.997,
        initial_value=1.0,
        epsilon=(0.1, 0.02, 100_000),
    ),
    "cliff_walking": Experiment(
        title="CliffWalking",
        env_id="CliffWalking-v1",
        threshold=-20.0,
        window=20,
        episodes=200,
        steps=10_000,
        learning_rate=0.5,
        discount=1.0,
        initial_value=0.0,
        epsilon=(0.1, 0.01, 5_000),
        max_episode_steps=200,
    ),
    "moved_goal": Experiment(
        title="Grid world, the goal moves at episode 300",
        env_id="palaestra/GridWorld-v0",
        threshold=-12.0,
        window=10,
        episodes=450,
        steps=15_000,
        learning_rate=0.5,
        discount=1.0,
        initial_value=0.0,
        epsilon=(0.1, 0.01, 5_000),
        env_kwargs={"later_goals": [[300, 5, 0]]},
        change=300,
    ),
}


def run_bdi(experiment: Experiment, seed: int, home: Path) -> list[float]:
    """The returns of a BDI run, as the run service would start it."""
    start, end, decay = experiment.epsilon
    config = {
        "episodes": experiment.episodes,
        "env_kwargs": experiment.env_kwargs,
        "max_episode_steps": experiment.max_episode_steps,
        "report_every": 1000,
        "q_learning": {
            "learning_rate": experiment.learning_rate,
            "discount": experiment.discount,
            "initial_value": experiment.initial_value,
            "epsilon_start": start,
            "epsilon_end": end,
            "epsilon_decay_steps": decay,
        },
    }
    spec = RunSpec(runner="spade-bdi", env_id=experiment.env_id, seed=seed, config=config)
    run = Home(home / "var" / "training").run(f"bdi-{seed}")
    attempt = run.attempt(1)
    paths = AttemptPaths(run.run_id, 1, run.path, attempt.path, attempt.work)
    plan = SpadeBdiRunner().plan(spec, paths, Machine(environment=dict(os.environ), free_disk_bytes=0))
    Attempt(paths.attempt_dir).work.mkdir(parents=True)
    Attempt(paths.attempt_dir).scratch.mkdir()
    done = subprocess.run(
        plan.argv, env=dict(plan.environment), cwd=plan.cwd, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    lines = [line.partition("@palaestra ")[2] for line in done.stdout.splitlines() if '"EpisodeSummary"' in line]
    return [float(json.loads(line)["episode_return"]) for line in lines]


def run_q_learning(experiment: Experiment, seed: int, home: Path) -> list[float]:
    """The returns of a run as `palaestra train` makes it, one update per step."""
    start, end, decay = experiment.epsilon
    config = {
        "env": {
            "id": experiment.env_id,
            "num_envs": 1,
            "kwargs": experiment.env_kwargs,
            "max_episode_steps": experiment.max_episode_steps,
        },
        "algorithm": {
            "name": "q_learning",
            "learning_rate": experiment.learning_rate,
            "gamma": experiment.discount,
            "initial_value": experiment.initial_value,
            "exploration_initial": start,
            "exploration_final": end,
            "exploration_fraction": decay / experiment.steps,
            "train_freq": 1,
        },
        "trainer": {"total_timesteps": experiment.steps, "seed": seed},
    }
    result = train(
        config_from({**config, "telemetry": {"progress": False}}),
        run_id=f"q-learning-{seed}",
        argv=[],
        root=Home(home / "var" / "training").runs,
        given="",
    )
    journal = result.run.attempt(1).journal
    lines = [line for line in journal.read_text().splitlines() if '"EpisodeSummary"' in line]
    return [float(json.loads(line)["episode_return"]) for line in lines]


def episodes_to_threshold(experiment: Experiment, returns: list[float]) -> int | None:
    """Episodes (after the change, if there is one) until the mean of a window reaches the threshold; None if never."""
    counted = returns[experiment.change :]
    for last in range(experiment.window, len(counted) + 1):
        if np.mean(counted[last - experiment.window : last]) >= experiment.threshold:
            return last
    return None


def summarize(experiment: Experiment, seeds: dict[str, list[float]]) -> dict[str, Any]:
    """Episodes to the threshold over the seeds, with an interval; runs that never reach it are counted apart."""
    reached = {seed: episodes_to_threshold(experiment, returns) for seed, returns in seeds.items()}
    numbers = [float(episodes) for episodes in reached.values() if episodes is not None]
    low, high = confidence_interval(numbers) or (float("nan"), float("nan"))
    final = [float(np.mean(returns[-experiment.window :])) for returns in seeds.values()]
    final_low, final_high = confidence_interval(final) or (float("nan"), float("nan"))
    return {
        "seeds": len(seeds),
        "episodes_to_threshold": reached,
        "mean": float(np.mean(numbers)) if numbers else None,
        "ci95": [low, high],
        "never": sum(episodes is None for episodes in reached.values()),
        "final_mean": float(np.mean(final)),
        "final_ci95": [final_low, final_high],
    }


def write_table(summaries: dict[str, dict[str, Any]]) -> str:
    """The table as Markdown."""
    lines = [
        "| experiment | agent | episodes to threshold (95 %) | never reached | return at the end (95 %) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, experiment in EXPERIMENTS.items():
        for agent in AGENTS:
            summary = summaries.get(name, {}).get(agent)
            if summary is None:
                continue
            low, high = summary["ci95"]
            reached = "–" if summary["mean"] is None else f"{summary['mean']:.0f} ({low:.0f} to {high:.0f})"
            final_low, final_high = summary["final_ci95"]
            final = f"{summary['final_mean']:.2f} ({final_low:.2f} to {final_high:.2f})"
            goal = f"{experiment.title}: mean of {experiment.window} ≥ {experiment.threshold:g}"
            lines.append(
                f"| {goal} | {NAMES[agent]} | {reached} | {summary['never']} of {summary['seeds']} | {final} |"
            )
    return "\n".join(lines) + "\n"


def draw(data: dict[str, Any]) -> None:
    """One panel per experiment: the moving mean of the return over the seeds, with its interval."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(EXPERIMENTS), figsize=(13, 3.6), constrained_layout=True)
    for axis, (name, experiment) in zip(axes, EXPERIMENTS.items(), strict=True):
        for agent in AGENTS:
            runs = list(data["runs"].get(name, {}).get(agent, {}).values())
            if not runs:
                continue
            length = min(experiment.episodes, *(len(returns) for returns in runs))
            window = experiment.window
            means = np.array([np.convolve(r[:length], np.ones(window) / window, "valid") for r in runs])
            episodes = np.arange(window, length + 1)
            middle, spread = means.mean(axis=0), 1.96 * means.std(axis=0, ddof=1) / np.sqrt(len(runs))
            axis.plot(episodes, middle, color=COLOURS[agent], label=NAMES[agent])
            axis.fill_between(episodes, middle - spread, middle + spread, color=COLOURS[agent], alpha=0.2, linewidth=0)
        axis.axhline(experiment.threshold, color="#9e9e9e", linewidth=0.8, linestyle="--")
        axis.set_title(experiment.title, fontsize=10)
        axis.set_xlabel("episode")
        axis.set_ylabel(f"return, mean of {experiment.window}")
        if experiment.threshold < 0:
            axis.set_ylim(-150 if experiment.change == 0 else -100, 0)
        axis.legend(fontsize=8, loc="lower right")
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / "bdi.png", dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Run what is missing, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", choices=tuple(EXPERIMENTS), action="append")
    parser.add_argument("--agents", choices=AGENTS, action="append")
    parser.add_argument("--again", action="store_true", help="repeat stored runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    store = args.results / "bdi.json"
    data: dict[str, Any] = json.loads(store.read_text()) if store.exists() and not args.again else {"runs": {}}
    for name in args.only or EXPERIMENTS:
        experiment = EXPERIMENTS[name]
        for agent in args.agents or AGENTS:
            runs = data["runs"].setdefault(name, {}).setdefault(agent, {})
            for seed in range(args.seeds):
                if str(seed) in runs:
                    continue
                began = time.monotonic()
                with tempfile.TemporaryDirectory() as home:
                    run = run_bdi if agent == "bdi" else run_q_learning
                    runs[str(seed)] = run(experiment, seed, Path(home))
                reached = episodes_to_threshold(experiment, runs[str(seed)])
                print(f"{name} {agent} seed {seed}: {reached} episodes, {time.monotonic() - began:.0f} s", flush=True)
                store.write_text(json.dumps(data))
    data["summaries"] = {
        name: {agent: summarize(EXPERIMENTS[name], runs) for agent, runs in agents.items()}
        for name, agents in data["runs"].items()
    }
    data["machine"] = machine.facts()
    store.write_text(json.dumps(data))
    table = write_table(data["summaries"])
    (args.results / "bdi.md").write_text(table)
    draw(data)
    print(table)


if __name__ == "__main__":
    main()
