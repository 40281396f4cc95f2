"""How much time does collecting in the background save? Beside the synchronous trainer, in turns, and the ideal.

With collecting C and learning L per update, in turn takes C + L and overlapped at best max(C, L). Both are measured in
the synchronous runs. Three parts: `slow` (policy and learner wait, as for a remote accelerator, over ratios L / C),
`batch` (one environment beside four that share each inference) and `busy` (both sides keep a core busy).
Run it as `python -m benchmarks.overlap [PART ...]`; it writes `results/overlap.json` and `results/overlap.md`.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks import machine
from benchmarks.learning import RESULTS, ROOT
from benchmarks.overlap_report import markdown
from benchmarks.slow_policy import SlowPolicy
from palaestra.actor.asynchronous import AsyncConfig
from palaestra.env import make_env
from palaestra.env.make import EnvConfig
from palaestra.learner.ppo import PPO
from palaestra.train import build_trainer, load_config
from palaestra.train.trainer import Trainer

STEPS = 8
"""Steps per segment of the slow policy; with the value of what follows, nine inferences."""
EPOCHS = 10
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
SLOW = {0.020: (12, RATIOS), 0.100: (5, RATIOS), 0.300: (4, (1.0,))}
"""Seconds per inference: updates per run, and learning as a multiple of collecting."""
BUSY = {
    "LunarLander-v3, 256 x 256 torch": (
        "ppo/lunarlander",
        ("trainer.compiled=off", "policy.hidden=[256,256]", "trainer.rollout_length=128", "algorithm.batch_size=256"),
    ),
    "LunarLander-v3, 64 x 64 kernels": ("ppo/lunarlander", ("trainer.rollout_length=512",)),
    "TableReach-v0, SmallVLA": ("vla/table_reach", ("trainer.rollout_length=64",)),
}


@dataclass(frozen=True)
class Run:
    """One training, as the clock saw it. Seconds."""

    whole: float
    """From the call to its end, first segment and start of a process included."""
    per_update: float
    """After the first update, before which there was nothing to overlap with."""
    collect: float
    learn: float
    steps: int


def time_training(trainer: Trainer, updates: int, rollout_length: int) -> Run:
    """Train for a number of updates and record the time after each."""
    moments: list[float] = []
    parts: list[tuple[float, float]] = []

    def note(_: Trainer, metrics: dict[str, float]) -> None:
        moments.append(time.perf_counter())
        parts.append((metrics["collect_seconds"], metrics["learn_seconds"]))

    began = time.perf_counter()
    steps = rollout_length * trainer.env.num_envs
    try:
        trainer.train(updates * steps, rollout_length, callback=note)
        whole = time.perf_counter() - began
    finally:
        trainer.env.close()
    collect, learn = (statistics.mean(part) for part in zip(*parts[1:], strict=True))
    return Run(whole, (moments[-1] - moments[0]) / (updates - 1), collect, learn, steps)


def in_turns(
    make: dict[str, Callable[[], Trainer]], updates: int, rollout_length: int, rounds: int
) -> dict[str, list[Run]]:
    """Each contender once per round, so that a busy moment of the machine hits all of them."""
    found: dict[str, list[Run]] = {name: [] for name in make}
    for turn in range(rounds):
        for name in list(make)[:: 1 if turn % 2 == 0 else -1]:
            found[name].append(time_training(make[name](), updates, rollout_length))
    return found


def row(found: dict[str, list[Run]], **about: Any) -> dict[str, Any]:
    """Ratios to the synchronous runs; means over the rounds."""

    def mean(name: str, field: str) -> float:
        return statistics.mean(getattr(run, field) for run in found[name])

    collect, learn = mean("sync", "collect"), mean("sync", "learn")
    ideal = (collect + learn) / max(collect, learn)
    result = about | {"collect": collect, "learn": learn, "ideal": ideal, "contenders": {}}
    for name in found:
        speedup = mean("sync", "per_update") / mean(name, "per_update")
        result["contenders"][name] = {
            "per_update": mean(name, "per_update"),
            "learn": mean(name, "learn"),
            "collect": mean(name, "collect"),
            "steps_per_second": found[name][0].steps / mean(name, "per_update"),
            "speedup": speedup,
            "of_ideal": speedup / ideal,
            "whole_run": mean("sync", "whole") / mean(name, "whole"),
            "rounds": [run.per_update for run in found[name]],
        }
        print(f"{about} {name}: {speedup:.2f} of {ideal:.2f}", flush=True)
    return result


@functools.cache
def computed_per_minibatch(num_envs: int) -> float:
    """Seconds that a minibatch takes beyond its sleep: what it really computes."""
    run = time_training(slow_trainer(0.02, 0.0, num_envs=num_envs, background=False), 6, STEPS)
    return run.learn / EPOCHS


def slow_trainer(seconds: float, ratio: float, *, num_envs: int, background: bool) -> Trainer:
    """CartPole behind a slow line, learning taking `ratio` times as long as collecting."""
    env = make_env(EnvConfig(id="CartPole-v1", num_envs=num_envs))
    policy = SlowPolicy(env.observation_space, env.action_space, seed=0)
    rows = STEPS * num_envs
    policy.infer_seconds, policy.learn_rows = seconds, rows
    if ratio:
        wanted = ratio * (STEPS + 1) * seconds / EPOCHS
        policy.learn_seconds = max(0.0, wanted - computed_per_minibatch(num_envs))
    algorithm = PPO(n_epochs=EPOCHS, batch_size=rows)
    return Trainer(policy, env, algorithm, asynchronous=AsyncConfig() if background else None)


def _slow_pair(seconds: float, ratio: float, num_envs: int) -> dict[str, Callable[[], Trainer]]:
    return {
        name: lambda background=background: slow_trainer(seconds, ratio, num_envs=num_envs, background=background)
        for name, background in (("sync", False), ("thread", True))
    }


def slow(rounds: int) -> list[dict[str, Any]]:
    """Policy and learner wait."""
    return [
        row(in_turns(_slow_pair(seconds, ratio, 1), updates, STEPS, rounds), seconds=seconds, ratio=ratio)
        for seconds, (updates, ratios) in SLOW.items()
        for ratio in ratios
    ]


def batch(rounds: int) -> list[dict[str, Any]]:
    """One environment, then four behind the same inference; a minibatch takes the same time for any number of rows."""
    return [
        row(in_turns(_slow_pair(0.1, 1.0, num_envs), 5, STEPS, rounds), seconds=0.1, num_envs=num_envs)
        for num_envs in (1, 4)
    ]


def busy(rounds: int) -> list[dict[str, Any]]:
    """Both sides compute, on as many cores as there are."""

    def make(config: str, settings: tuple[str, ...], collector: str | None) -> Trainer:
        more = [] if collector is None else ["trainer.collection=asynchronous", f"trainer.collector={collector}"]
        return build_trainer(
            load_config(ROOT / "configs" / f"{config}.yaml", ["trainer.torch_threads=1", *settings, *more])
        )

    found = []
    for title, (config, settings) in BUSY.items():
        makers = {
            name: lambda collector=collector: make(config, settings, collector)  # noqa: B023  used before the next one
            for name, collector in (("sync", None), ("thread", "thread"), ("process", "process"))
        }
        length = load_config(ROOT / "configs" / f"{config}.yaml", list(settings)).rollout_length
        time_training(makers["sync"](), 2, length)  # compile the kernels before measuring
        load = machine.load()
        found.append(row(in_turns(makers, 12, length, rounds), title=title, load=load))
    return found


PARTS = {"slow": slow, "batch": batch, "busy": busy}


def main() -> None:
    """Measure the parts asked for, keep what is stored of the others."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__.split("\n", 1)[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)} (all)")
    parser.add_argument("--rounds", type=int, default=2, help="turns that sync and asynchronous take (2)")
    parser.add_argument("--render", action="store_true", help="only write the tables again")
    arguments = parser.parse_args()
    stored = RESULTS / "overlap.json"
    found: dict[str, Any] = json.loads(stored.read_text()) if stored.exists() else {}
    for name in [] if arguments.render else arguments.parts or PARTS:
        found[name] = {"machine": machine.facts(), "rows": PARTS[name](arguments.rounds)}
        stored.write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "overlap.md").write_text(markdown(found))


if __name__ == "__main__":
    main()
