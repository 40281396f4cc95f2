"""A pretrained vision-language-action model before and after learning by reward: share of solved scenes, by seed.

`python -m benchmarks.fine_tuning` trains `configs/vla/table_reach.yaml` in turn and in the background and evaluates
each policy greedily on scenes it never saw. Writes benchmarks/results/fine_tuning.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from palaestra.env import make_env
from palaestra.evaluation import evaluate
from palaestra.evaluation.statistics import wilson_interval
from palaestra.intervals import confidence_interval
from palaestra.train import load_config
from palaestra.train.trainer import build_trainer

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
HELD_OUT = 5_000_000
"""Scenes from this seed on; training draws from others."""


def count_solved(trainer, config, episodes: int) -> int:
    env = make_env(config.env.model_copy(update={"num_envs": 20, "vectorization": "in_process"}))
    try:
        found = evaluate(trainer.policy, env, episodes=episodes, seed=HELD_OUT)
    finally:
        env.close()
    assert found.successes is not None
    return sum(found.successes)


def measure(name: str, seed: int, settings: list[str], episodes: int) -> dict[str, object]:
    config = load_config(ROOT / "configs" / "vla" / f"{name}.yaml", settings, seed=seed)
    trainer = build_trainer(config)
    try:
        before = count_solved(trainer, config, episodes)
        began = time.perf_counter()
        history = trainer.train(config.total_timesteps, config.rollout_length)
        seconds = time.perf_counter() - began
        after = count_solved(trainer, config, episodes)
    finally:
        trainer.env.close()
    staleness = float(np.mean([metrics["staleness"] for metrics in history]))
    return {"before": before, "after": after, "seconds": round(seconds, 1), "staleness": round(staleness, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5)
    asked = parser.parse_args()
    lanes = {
        "in turn": ["trainer.collection=synchronous"],
        "in the background, staleness up to 1": ["trainer.collection=asynchronous"],
    }
    runs = []
    for name in ("table_reach", "table_reach_chunk4"):
        for lane, settings in lanes.items():
            if name == "table_reach_chunk4" and lane == "in turn":
                continue
            for seed in range(1, asked.seeds + 1):
                run = {"config": name, "lane": lane, "seed": seed, "episodes": asked.episodes}
                runs.append(run | measure(name, seed, settings, asked.episodes))
                print(json.dumps(runs[-1]), flush=True)
                (RESULTS / "fine_tuning.json").write_text(json.dumps(runs, indent=1) + "\n")
                (RESULTS / "fine_tuning.md").write_text(table(runs))


def table(runs: list[dict]) -> str:
    lines = [
        "| model | collection | seeds | solved before | solved after (mean) | 95 % interval | single seeds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for key in dict.fromkeys((run["config"], run["lane"]) for run in runs):
        group = [run for run in runs if (run["config"], run["lane"]) == key]
        n = group[0]["episodes"]
        low, high = (100 * share for share in wilson_interval(group[0]["before"], n))
        after = tuple(100 * run["after"] / n for run in group)
        least, most = confidence_interval(after) or (float("nan"), float("nan"))
        first = 100 * group[0]["before"] / n
        single = ", ".join(f"{share:.1f}" for share in after)
        lines.append(
            f"| `{key[0]}` | {key[1]} | {len(group)} | {first:.1f} % ({low:.1f} to {high:.1f}) | "
            f"{np.mean(after):.1f} % | {least:.1f} to {min(most, 100.0):.1f} | {single} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
