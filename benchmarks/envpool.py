"""Training on EnvPool beside training in this process, in turns on one core, as ratios; and what both learn.

    python -m benchmarks.envpool             speed: steps per CPU second of whole training
    python -m benchmarks.envpool --learning  scores of both after the same number of steps, several seeds
    python -m benchmarks.envpool --render    writes the tables again from the stored numbers

Both trainers live in one process that is pinned to one core, and make one iteration (a collection and an update) after
the other, so that both meet the same load. Settings are those of `benchmarks.workloads`; where the number of
environments differs, an iteration has the same number of steps. *Steps per CPU second* counts the processor time of all
threads, also of EnvPool's; the ratio is that of the medians over all iterations.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import facts
from benchmarks.workloads import WORKLOADS, Workload

RESULTS = Path(__file__).parent / "results"
BACKENDS = ("gymnasium", "envpool")
CASES = (
    ("cartpole", 8), ("cartpole", 64),
    ("pendulum", 8), ("pendulum", 16), ("pendulum", 64), ("pendulum", 128),
    ("lunarlander", 16), ("lunarlander", 64),
    ("halfcheetah", 1), ("halfcheetah", 8), ("halfcheetah", 16), ("halfcheetah", 64),
)  # fmt: skip
LEARNING = {"cartpole": 100_000, "pendulum": 200_000, "lunarlander": 300_000}
"""Workloads and steps of the comparison of scores."""


@dataclass
class Contender:
    """One trainer, and what its iterations took."""

    backend: str
    trainer: Any
    workload: Workload

    def __post_init__(self) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self.learning: list[float] = []
        self._steps = 0

    def iterate(self) -> None:
        """Collect and learn once, and note the times."""
        self._steps += self.workload.batch
        cpu, wall = time.process_time(), time.perf_counter()
        history = self.trainer.train(total_timesteps=self._steps, rollout_length=self.workload.num_steps)
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)
        self.learning.append(history[-1]["learn_seconds"])

    def to_json(self) -> dict[str, Any]:
        """All times, without the first iterations (compilation)."""
        return {
            "backend": self.backend,
            "cpu_seconds": [round(t, 6) for t in self.cpu],
            "wall_seconds": [round(t, 6) for t in self.wall],
            "learn_seconds": [round(t, 6) for t in self.learning],
        }


def make_trainer(w: Workload, backend: str, seed: int = 1) -> Any:
    """A trainer with the settings of the workload."""
    from palaestra.env.make import EnvConfig, make_env
    from palaestra.learner.ppo import PPO
    from palaestra.policy.actor_critic import ActorCritic
    from palaestra.policy.config import PolicyConfig
    from palaestra.train.trainer import Trainer

    vectorization = "in_process" if backend == "gymnasium" else "auto"
    env = make_env(EnvConfig(id=w.env_id, num_envs=w.num_envs, backend=backend, vectorization=vectorization))
    policy = ActorCritic(env.observation_space, env.action_space, PolicyConfig(hidden=w.hidden), seed=seed)
    algorithm = PPO(
        n_epochs=w.epochs, batch_size=w.minibatch, learning_rate=w.learning_rate, gamma=w.gamma,
        gae_lambda=w.gae_lambda, clip_range=w.clip, value_clip=w.value_clip, entropy_coef=w.entropy_coef,
        value_coef=w.value_coef, max_grad_norm=w.max_grad_norm,
    )  # fmt: skip
    return Trainer(policy, env, algorithm, seed=seed)


def measure(name: str, num_envs: int, seconds: float) -> dict[str, Any]:
    """Iterations of both in turns until `seconds` of processor time have passed, at least five of each."""
    w = WORKLOADS[name]
    w = replace(w, num_envs=num_envs, num_steps=w.batch // num_envs)
    both = [Contender(backend, make_trainer(w, backend), w) for backend in BACKENDS]
    for one in both:  # compiles the kernels
        one.iterate()
        one.__post_init__()
        one._steps = w.batch
    began = time.process_time()
    while time.process_time() - began < seconds or len(both[0].cpu) < 5:
        for one in both:
            one.iterate()
    for one in both:
        one.trainer.env.close()
    return {"workload": name, "num_envs": num_envs, "steps": w.batch, "runs": [one.to_json() for one in both]}


def learn(name: str, steps: int, seed: int) -> dict[str, Any]:
    """Mean return of 20 held-out episodes in Gymnasium of what each backend has learned."""
    from palaestra.env.make import EnvConfig, make_env
    from palaestra.evaluation.play import evaluate

    w, found = WORKLOADS[name], {}
    for backend in BACKENDS:
        trainer = make_trainer(w, backend, seed)
        trainer.train(total_timesteps=steps, rollout_length=w.num_steps)
        trainer.env.close()
        env = make_env(EnvConfig(id=w.env_id, num_envs=10, vectorization="in_process"))
        found[backend] = evaluate(trainer.policy, env, episodes=20, seed=1_000_003 + seed).mean_return
        env.close()
    return {"workload": name, "steps": steps, "seed": seed, **found}


def markdown(found: dict[str, Any]) -> str:
    """The tables that docs/benchmarks.md includes."""
    machine = found["machine"]
    lines = [
        "<!-- written by `python -m benchmarks.envpool` -->",
        "",
        f"Measured on {machine['date']}: {machine['processor']}, one of {machine['cores']} cores, Python "
        f"{machine['python']}, envpool {found['envpool']}, load {machine['load_at_start']} before the start. Both take "
        "turns in one process on one core; medians over all iterations.",
        "",
        "| workload | environments | in process, steps/CPU s | EnvPool, steps/CPU s | ratio | best iterations |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for case in found["speed"]:
        medians = [case["steps"] / statistics.median(run["cpu_seconds"]) for run in case["runs"]]
        bests = [case["steps"] / min(run["cpu_seconds"]) for run in case["runs"]]
        title = WORKLOADS[case["workload"]].title
        lines.append(
            f"| {title} | {case['num_envs']} | {medians[0]:,.0f} | {medians[1]:,.0f} | {medians[1] / medians[0]:.2f}x "
            f"| {bests[1] / bests[0]:.2f}x |"
        )
    if found.get("learning"):
        lines += [
            "",
            "Mean return of 20 episodes in Gymnasium after the same number of steps, one value per seed:",
            "",
            "| workload | steps | trained in process | trained on EnvPool |",
            "| --- | ---: | --- | --- |",
        ]
    for name in dict.fromkeys(run["workload"] for run in found.get("learning", ())):
        runs = [run for run in found["learning"] if run["workload"] == name]
        scores = [", ".join(f"{run[backend]:,.0f}" for run in runs) for backend in BACKENDS]
        lines.append(f"| {WORKLOADS[name].title} | {runs[0]['steps']:,} | {scores[0]} | {scores[1]} |")
    return "\n".join(lines) + "\n"


def _write(found: dict[str, Any], folder: Path) -> None:
    (folder / "envpool.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / "envpool.md").write_text(markdown(found))


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.envpool", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="processor seconds per case")
    parser.add_argument("--only", action="append", choices=WORKLOADS, help="this workload (may be repeated)")
    parser.add_argument("--learning", action="store_true", help="compare scores instead of speed")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the comparison of scores")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write")
    parser.add_argument("--render", action="store_true", help="only write the tables again")
    arguments = parser.parse_args()
    file = arguments.results / "envpool.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"speed": [], "learning": []}
    if arguments.render:
        _write(found, arguments.results)
        return
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from importlib.metadata import version

    kind = "learning" if arguments.learning else "speed"
    names = arguments.only or (LEARNING if arguments.learning else WORKLOADS)
    found |= {"machine": facts(), "envpool": version("envpool")}
    found[kind] = [one for one in found[kind] if one["workload"] not in names]
    # MuJoCo writes its log to the current directory.
    with tempfile.TemporaryDirectory() as scratch:
        here = Path.cwd()
        os.chdir(scratch)
        try:
            for name in names:
                if arguments.learning:
                    found[kind] += [learn(name, LEARNING[name], seed) for seed in range(1, arguments.seeds + 1)]
                else:
                    found[kind] += [measure(case, n, arguments.seconds) for case, n in CASES if case == name]
                _write(found, here / arguments.results)
        finally:
            os.chdir(here)
    print(markdown(found))


if __name__ == "__main__":
    main()
