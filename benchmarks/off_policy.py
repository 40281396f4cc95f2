"""DQN and SAC beside Stable-Baselines3: the same networks, batches and schedules, on one core, by turns.

Both contenders are built from one configuration of `configs/off_policy`. A run is timed from its first gradient step
on; afterwards the policy is evaluated greedily on the same number of held-out episodes. One line per finished run is
appended to `results/off_policy.jsonl`, and a stored run is not repeated, so a long benchmark can be stopped and
continued. The table, also in `results/off_policy.md`, has means over seeds with 95 % intervals and the ratio of speeds.

    taskset -c 1 python -m benchmarks.off_policy --workloads cartpole pendulum --seeds 1 2 3
    taskset -c 1 python -m benchmarks.off_policy --workloads cartpole --steps 3000 --seeds 1 --results /tmp/short.jsonl
    python -m benchmarks.off_policy --report
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import torch
from scipy import stats

from benchmarks import machine
from palaestra.env.make import make_env
from palaestra.evaluation.play import evaluate
from palaestra.train.config import RunConfig, load_config
from palaestra.train.evaluation import evaluation_env
from palaestra.train.run import run_updates
from palaestra.train.transitions import build_transition_training

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
STORED = RESULTS / "off_policy.jsonl"
EVAL_SEED = 1_000_003
WORKLOADS = {
    "cartpole": "dqn_cartpole",
    "lunarlander": "dqn_lunarlander",
    "pendulum": "sac_pendulum",
    "halfcheetah": "sac_halfcheetah",
}
CONTENDERS = ("sb3", "palaestra", "palaestra-bfloat16")


@dataclass(frozen=True)
class Result:
    """One finished run."""

    contender: str
    workload: str
    seed: int
    steps: int
    steps_per_second: float
    """Environment steps per second of wall-clock time, from the first gradient step on."""
    cpu_ms_per_step: float
    """Processor time of the same steps, which does not count the time of other processes."""
    mean_return: float
    episodes: int
    machine: dict[str, Any] = field(default_factory=dict)


def load_workload(name: str, steps: int | None, seed: int, *overrides: str) -> RunConfig:
    """The configuration of a workload without evaluations and checkpoints in between."""
    words = [f"trainer.seed={seed}", "trainer.eval_every=null", "telemetry.progress=false", *overrides]
    if steps is not None:
        words.append(f"trainer.total_timesteps={steps}")
    return load_config(ROOT / "configs" / "off_policy" / f"{WORKLOADS[name]}.yaml", words)


class _Clock:
    """Wall-clock and processor time since the first gradient step."""

    def __init__(self) -> None:
        self._began: tuple[int, float, float] | None = None

    def start(self, steps: int) -> None:
        if self._began is None:
            self._began = steps, time.perf_counter(), time.process_time()

    def read(self, steps: int) -> dict[str, float]:
        assert self._began is not None, "the run took no gradient step"
        taken, wall, cpu = steps - self._began[0], time.perf_counter(), time.process_time()
        rate = taken / (wall - self._began[1])
        return {"steps_per_second": rate, "cpu_ms_per_step": 1e3 * (cpu - self._began[2]) / taken}


def run_palaestra(config: RunConfig, episodes: int) -> dict[str, float]:
    """Train and evaluate."""
    training, clock = build_transition_training(config), _Clock()
    source = training.source
    try:
        with training.limit_threads():
            updates = run_updates(source, training.learner, training.publisher, training.is_complete)
            for _ in updates:
                # After the first update, so that compilation is not part of the figure.
                clock.start(source.progress.steps)
            speed = clock.read(source.progress.steps)
        env = make_env(evaluation_env(config, episodes))
        try:
            score = evaluate(training.policy, env, episodes=episodes, seed=EVAL_SEED).mean_return
        finally:
            env.close()
    finally:
        training.env.close()
    return {**speed, "mean_return": score}


def run_sb3(config: RunConfig, episodes: int) -> dict[str, float]:
    """The same run with Stable-Baselines3."""
    from stable_baselines3 import DQN, SAC
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor

    clock = _Clock()

    class Started(BaseCallback):
        """Starts the clock after the first update."""

        def _on_step(self) -> bool:
            if self.model._n_updates > 0:
                clock.start(self.model.num_timesteps - 1)
            return True

    make, settings = (DQN, _dqn_settings(config)) if config.algorithm["name"] == "dqn" else (SAC, _sac_settings(config))
    env = gymnasium.make(config.env.id, **config.env.kwargs)
    model: Any = make("MlpPolicy", env, device="cpu", seed=config.trainer.seed, **settings)
    model.learn(config.total_timesteps, callback=Started())
    speed = clock.read(model.num_timesteps)
    held_out = Monitor(gymnasium.make(config.env.id, **config.env.kwargs))
    held_out.reset(seed=EVAL_SEED)
    score, _ = evaluate_policy(model, held_out, n_eval_episodes=episodes, deterministic=True)
    env.close()
    held_out.close()
    return {**speed, "mean_return": float(score)}


def _shared_settings(config: RunConfig) -> dict[str, Any]:
    a, activation = config.algorithm, {"relu": torch.nn.ReLU, "tanh": torch.nn.Tanh}[config.policy.activation]
    if a["learning_rate_schedule"] == "cosine":
        raise SystemExit("Both contenders need a constant or a linear learning rate.")
    rate = a["learning_rate"]
    schedule = rate if a["learning_rate_schedule"] == "constant" else lambda remaining: rate * remaining
    same = ("gamma", "batch_size", "buffer_size", "learning_starts", "train_freq", "gradient_steps")
    network = {"net_arch": list(config.policy.hidden), "activation_fn": activation}
    settings = {key: a[key] for key in same}
    return {**settings, "learning_rate": schedule, "tau": a["target_tau"], "policy_kwargs": network}


def _dqn_settings(config: RunConfig) -> dict[str, Any]:
    a = config.algorithm
    if a["double"] or a["prioritized"] or config.policy.kwargs:
        raise SystemExit("Stable-Baselines3 has neither double, dueling nor prioritised DQN.")
    per_update = a["train_freq"] if a["gradient_steps"] == -1 else a["gradient_steps"]
    return {
        **_shared_settings(config),
        "max_grad_norm": a["max_grad_norm"],
        # Counted in environment steps there, in gradient steps here.
        "target_update_interval": max(1, a["target_interval"] * a["train_freq"] // per_update),
        "exploration_fraction": a["exploration_fraction"],
        "exploration_initial_eps": a["exploration_initial"],
        "exploration_final_eps": a["exploration_final"],
    }


def _sac_settings(config: RunConfig) -> dict[str, Any]:
    a = config.algorithm
    target = a["target_entropy"]
    return {
        **_shared_settings(config),
        "target_update_interval": a["target_interval"],
        "ent_coef": "auto" if a["temperature"] is None else a["temperature"],
        "target_entropy": "auto" if target is None else target,
    }


def run(contender: str, name: str, seed: int, steps: int | None, episodes: int) -> Result:
    """One run of one contender."""
    overrides = ("algorithm.precision=bfloat16",) if contender == "palaestra-bfloat16" else ()
    config = load_workload(name, steps, seed, *overrides)
    figures = (run_sb3 if contender == "sb3" else run_palaestra)(config, episodes)
    where = machine.facts()
    return Result(contender, name, seed, config.total_timesteps, episodes=episodes, machine=where, **figures)


def read_results(path: Path) -> list[Result]:
    """The stored runs."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Result(**json.loads(line)) for line in lines]


def _rows(results: list[Result]) -> Iterator[str]:
    yield "| workload | steps | contender | seeds | mean return | steps/s | CPU ms/step | times SB3 (CPU) |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, steps in dict.fromkeys((r.workload, r.steps) for r in results):
        group = [r for r in results if (r.workload, r.steps) == (name, steps)]
        reference = {r.seed: r.cpu_ms_per_step for r in group if r.contender == "sb3"}
        for contender in dict.fromkeys(r.contender for r in group):
            own = [r for r in group if r.contender == contender]
            ratios = [reference[r.seed] / r.cpu_ms_per_step for r in own if r.seed in reference]
            cells = (
                _interval([r.mean_return for r in own]),
                _interval([r.steps_per_second for r in own]),
                _interval([r.cpu_ms_per_step for r in own], digits=3),
                _interval(ratios, digits=2) if contender != "sb3" and ratios else "1",
            )
            yield f"| {name} | {steps:,} | {contender} | {len(own)} | {' | '.join(cells)} |"


def _interval(numbers: list[float], digits: int = 1) -> str:
    mean = statistics.fmean(numbers)
    if len(numbers) < 2:
        return f"{mean:.{digits}f}"
    width = statistics.stdev(numbers) / math.sqrt(len(numbers)) * float(stats.t.ppf(0.975, len(numbers) - 1))
    return f"{mean:.{digits}f} ± {width:.{digits}f}"


def write_report(results: list[Result], path: Path) -> str:
    """The table, also as a file."""
    text = "\n".join(_rows(results)) + "\n"
    path.write_text(f"# Off-policy learning beside Stable-Baselines3\n\n{text}", encoding="utf-8")
    return text


def main() -> None:
    """Run what is not stored yet, one contender after the other for every seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="instead of the length in the configuration")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--results", type=Path, default=STORED)
    parser.add_argument("--report", action="store_true", help="only write the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in [] if options.report else options.workloads:
        for seed in options.seeds:
            for contender in options.contenders:
                if contender == "palaestra-bfloat16" and WORKLOADS[name].startswith("dqn"):
                    continue  # the kernel of DQN computes in float32
                length = load_workload(name, options.steps, seed).total_timesteps
                known = {(r.contender, r.workload, r.seed, r.steps) for r in read_results(options.results)}
                if (contender, name, seed, length) in known:
                    continue
                result = run(contender, name, seed, options.steps, options.episodes)
                with options.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
                print(result, flush=True)
    results = read_results(options.results)
    if results:
        print(write_report(results, options.results.with_suffix(".md")))


if __name__ == "__main__":
    main()
