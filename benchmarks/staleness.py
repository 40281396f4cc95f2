"""Does it learn as well from what older weights did? Synchronous beside exact staleness 1 to 8, corrected or not.

Every asynchronous run is `reproducible`: its experience is exactly `max_staleness` updates old at any timing, so
it repeats bit for bit. One line per run is appended to `results/staleness.jsonl`; a stored run is not repeated. A
second part, `--slow`, trains behind a policy and a learner that wait, where overlap saves time. `--render` writes
`results/staleness.md` and the pictures. Run it as `python -m benchmarks.staleness`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.learning import EVAL_SEED, RESULTS, ROOT
from benchmarks.slow_policy import SlowPolicy
from palaestra.actor.asynchronous import AsyncConfig
from palaestra.env import make_env
from palaestra.env.make import EnvConfig
from palaestra.evaluation import evaluate
from palaestra.learner.ppo import PPO
from palaestra.train import build_trainer, load_config
from palaestra.train.trainer import Trainer

STORED = RESULTS / "staleness.jsonl"
STALENESS = (1, 2, 4, 8)
CORRECTIONS = ("decoupled", "none", "vtrace")
CURVE_POINTS = 40
EVAL_EPISODES = 50


@dataclass(frozen=True)
class Task:
    """A published configuration, shortened so that seventy runs of it are affordable."""

    title: str
    config: str
    steps: int
    settings: tuple[str, ...] = ()


TASKS = {
    "cartpole": Task("CartPole-v1", "ppo/cartpole", 200_000),
    # The published rollouts are so long that the short budget would hold 18 of them, and staleness 8 half of those.
    "lunarlander": Task("LunarLander-v3", "ppo/lunarlander", 300_000, ("trainer.rollout_length=256",)),
    "reach": Task("TableReach-v0 (images)", "vla/table_reach", 25_000, ("trainer.rollout_length=64",)),
}


@dataclass(frozen=True)
class Mode:
    """How stale, and what is done about it; staleness 0 is the synchronous trainer."""

    staleness: int = 0
    correction: str = "sync"

    @property
    def settings(self) -> list[str]:
        """As overrides of a configuration."""
        if not self.staleness:
            return []
        correction, _, more = self.correction.partition(", ")
        return [
            "trainer.collection=asynchronous", "trainer.collector=thread", "trainer.reproducible=true",
            f"trainer.max_staleness={self.staleness}", f"algorithm.correction={correction}",
            *([f"algorithm.{more.replace(' ', '=')}"] if more else []),
        ]  # fmt: skip


MODES = (Mode(), *(Mode(s, correction) for s in STALENESS for correction in CORRECTIONS))
TIGHTER = "decoupled, weight_limit 2"
CONTRASTS = {"lunarlander": (Mode(4, TIGHTER), Mode(8, TIGHTER)), "reach": tuple(Mode(s, TIGHTER) for s in STALENESS)}
"""The default with a tighter limit, where the limit makes a difference."""
SLOW_STEPS, SLOW_INFER, SLOW_LEARN = 80_000, 0.005, 0.040
"""CartPole at 128 inferences and 16 minibatches per update: 0.64 s of each."""


class Observer:
    """Notes a run's curve and its diagnostics from the trainer's callback."""

    def __init__(self) -> None:
        self.curve: list[tuple[int, float, float]] = []
        self.seen: dict[str, list[float]] = {}
        self.began = time.perf_counter()

    def __call__(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """After each update."""
        if "episode_return" in metrics:
            self.curve.append((trainer.total_timesteps, time.perf_counter() - self.began, metrics["episode_return"]))
        for name in ("staleness", "behaviour_weight", "approx_kl", "clip_fraction"):
            if name in metrics:
                self.seen.setdefault(name, []).append(metrics[name])

    def record(self, trainer: Trainer) -> dict[str, Any]:
        """What is kept."""
        stride = max(1, -(-len(self.curve) // CURVE_POINTS))
        points = self.curve[::-1][::stride][::-1]
        kept = {name: round(float(np.mean(numbers)), 5) for name, numbers in self.seen.items()}
        kept["final_staleness"] = self.seen["staleness"][-1]
        kept["lowest_weight"] = round(min(self.seen.get("behaviour_weight", [1.0])), 5)
        return {
            "training": round(float(np.mean(trainer.episode_rewards)), 3),
            "mean_over_training": round(float(np.mean([value for _, _, value in self.curve])), 3),
            "seconds": round(self.curve[-1][1], 2),
            **kept,
            "curve": [[at, round(seconds, 2), round(value, 3)] for at, seconds, value in points],
        }


def run_once(task: Task, mode: Mode, seed: int) -> dict[str, Any]:
    """One training and its evaluation."""
    settings = [f"trainer.total_timesteps={task.steps}", *task.settings, *mode.settings]
    config = load_config(ROOT / "configs" / f"{task.config}.yaml", settings, seed=seed)
    trainer, observer = build_trainer(config), Observer()
    try:
        trainer.train(config.total_timesteps, config.rollout_length, callback=observer)
    finally:
        trainer.env.close()
    env = make_env(config.env.model_copy(update={"num_envs": 10, "vectorization": "in_process"}))
    try:
        found = evaluate(trainer.policy, env, episodes=EVAL_EPISODES, seed=seed + EVAL_SEED)
    finally:
        env.close()
    return observer.record(trainer) | {"evaluation": round(found.mean_return, 3), "updates": trainer.n_updates}


def run_slow(mode: Mode, seed: int) -> dict[str, Any]:
    """CartPole behind a policy that takes 5 ms per inference and 40 ms per minibatch of learning."""
    env = EnvConfig(id="CartPole-v1", num_envs=4)
    vector = make_env(env)
    policy = SlowPolicy(vector.observation_space, vector.action_space, seed=seed)
    policy.infer_seconds, policy.learn_seconds, policy.learn_rows = SLOW_INFER, SLOW_LEARN, 128
    algorithm = PPO(learning_rate=2.5e-4, learning_rate_schedule="linear", n_epochs=4, batch_size=128)
    background = AsyncConfig(max_staleness=mode.staleness) if mode.staleness else None
    trainer, observer = Trainer(policy, vector, algorithm, seed=seed, asynchronous=background), Observer()
    try:
        trainer.train(SLOW_STEPS, 128, callback=observer)
    finally:
        vector.close()
    return observer.record(trainer) | {"updates": trainer.n_updates}


def load_stored_runs() -> list[dict[str, Any]]:
    """Every run so far; a line that was cut off by a kill counts as not run."""
    found = []
    for line in STORED.read_text().splitlines() if STORED.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def _list_runs(arguments: argparse.Namespace) -> Iterator[tuple[str, Mode, int]]:
    """Seed by seed within each cell, the synchronous and the default ones first: stopping early loses the least."""
    if arguments.slow:
        yield from (("slow", mode, seed) for seed in range(arguments.seeds) for mode in (Mode(), Mode(1, "decoupled")))
        return
    seeds, names = range(arguments.seeds), arguments.only or TASKS
    default = [Mode(), *(Mode(s, CORRECTIONS[0]) for s in STALENESS)]
    others = [Mode(s, correction) for s in (4, 8, 2, 1) for correction in CORRECTIONS[1:]]
    yield from ((name, mode, seed) for seed in seeds for name in names for mode in default)
    yield from ((name, mode, seed) for name in names for mode in CONTRASTS.get(name, ()) for seed in seeds)
    yield from ((name, mode, seed) for mode in others for seed in seeds for name in names)


def main() -> None:
    """Run what is missing, or only write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", action="append", choices=TASKS, help="this task (may be repeated)")
    parser.add_argument("--seeds", type=int, default=5, help="runs per cell (5)")
    parser.add_argument("--slow", action="store_true", help="the runs behind a slow policy instead")
    parser.add_argument("--render", action="store_true", help="only write the tables and the pictures again")
    arguments = parser.parse_args()
    if not arguments.render:
        done = {(run["task"], run["staleness_wanted"], run["correction"], run["seed"]) for run in load_stored_runs()}
        for name, mode, seed in _list_runs(arguments):
            key = {"task": name, "staleness_wanted": mode.staleness, "correction": mode.correction, "seed": seed}
            if tuple(key.values()) in done:
                continue
            done.add(tuple(key.values()))
            run = run_slow(mode, seed) if name == "slow" else run_once(TASKS[name], mode, seed)
            with STORED.open("a") as file:
                file.write(json.dumps(key | run) + "\n")
            print(f"{name} s={mode.staleness} {mode.correction} seed {seed}: {run['training']:.2f}", flush=True)
    from benchmarks.staleness_report import write

    write(load_stored_runs())


if __name__ == "__main__":
    main()
