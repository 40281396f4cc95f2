"""A vision-language model on screens: rejection sampling, GRPO and PPO from one start, at equal episodes.

`python -m benchmarks.ui_learning` trains the built-in tiny model on `click_target` and three MiniWoB++ tasks at once,
with each algorithm and several seeds, in real browsers. Every update plays the same number of episodes for every
algorithm. Start and ends are played on held-out seeds, answers drawn as in training. Each run is a
separate process. Writes benchmarks/results/ui_learning.json after every run; `--report` makes the table and the
curves of what is there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.machine import facts, load
from benchmarks.ui_runs import (
    ALGORITHMS,
    COLOURS,
    add_tasks,
    count_solved,
    evaluate_held_out,
    format_share,
    format_table,
    list_checkpoints,
    read_training_steps,
    train_model,
)
from palaestra.files.run_directory import RunDirectory

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
CURVES = ROOT / "docs" / "images" / "ui-learning.png"
TASKS = ("click_target/button", "miniwob/click-dialog", "miniwob/click-tab", "miniwob/focus-text")
CONFIG = {
    "experiment_name": "ui-learning",
    "model": {"name": "tiny", "max_new_tokens": 24, "history": 0, "lora_rank": 16},
    "tasks": [
        {"task": task, "params": {"step_limit": 1} | ({"difficulty": 2} if task == TASKS[0] else {})} for task in TASKS
    ],
    "trainer": {
        "batch_size": 64, "num_training_steps": 12, "max_refills": 0, "learning_rate": 1e-3, "decay_updates": 12,
        "epochs": 2, "minibatches": 4, "microbatch_turns": 64, "collection": "synchronous",
    },
    "actor_pool": {"target_concurrent_actors": 16},
}  # fmt: skip


def success_curve(run: RunDirectory) -> list[float]:
    """The share of an update's episodes that were solved; every one is on a seed that was never played before."""
    return [round(metrics["success_rate"], 4) for metrics in read_training_steps(run)]


def measure(seeds: int, episodes: int) -> None:
    """All runs, seeds first, so that what is there at any moment compares all algorithms."""
    told = RESULTS / "ui_learning.json"
    found = json.loads(told.read_text()) if told.exists() else {"machine": facts(), "start": {}, "runs": []}
    with tempfile.TemporaryDirectory(prefix="palaestra-ui-learning-") as directory:
        home = Path(directory)
        for seed in range(1, seeds + 1):
            for algorithm in ALGORITHMS:
                if any((run["algorithm"], run["seed"]) == (algorithm, seed) for run in found["runs"]):
                    continue
                run = train_model(CONFIG | {"algorithm": ALGORITHMS[algorithm]}, seed, home)
                first, *_, last = list_checkpoints(run)
                if not found["start"]:
                    found["start"] = count_solved(evaluate_held_out(first, episodes, home))
                after = count_solved(evaluate_held_out(last, episodes, home))
                found["runs"].append(
                    {"algorithm": algorithm, "seed": seed, "after": after, "curve": success_curve(run), "load": load()}
                )
                told.write_text(json.dumps(found, indent=1) + "\n")
                print(algorithm, seed, format_share(add_tasks(after)), flush=True)


def report() -> None:
    """The table and the curves."""
    found = json.loads((RESULTS / "ui_learning.json").read_text())
    start, runs = found["start"], found["runs"]
    rows = [["", "all four", *(f"`{task}`" for task in start), "single seeds"]]
    rows.append(["before", format_share(add_tasks(start)), *map(format_share, start.values()), ""])
    for algorithm in ALGORITHMS:
        own = [run["after"] for run in runs if run["algorithm"] == algorithm]
        if not own:
            continue
        pooled = {task: [int(n) for n in np.sum([one[task] for one in own], axis=0)] for task in start}
        single = ", ".join(f"{100 * add_tasks(one)[0] / add_tasks(one)[1]:.0f}" for one in own)
        rows.append([algorithm, format_share(add_tasks(pooled)), *map(format_share, pooled.values()), single])
    (RESULTS / "ui_learning.md").write_text(format_table(rows))
    draw(runs, add_tasks(start))


def draw(runs: list[dict], start: tuple[int, int]) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    batch = CONFIG["trainer"]["batch_size"]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.axhline(100 * start[0] / start[1], color="#999", linewidth=1, linestyle=":", label="before")
    for algorithm, colour in COLOURS.items():
        curves = [run["curve"] for run in runs if run["algorithm"] == algorithm]
        if not curves:
            continue
        length = min(len(one) for one in curves)
        x = np.arange(1, length + 1) * batch
        for one in curves:
            axes.plot(x, 100 * smooth(one[:length]), color=colour, alpha=0.25, linewidth=1)
        mean = np.mean([one[:length] for one in curves], axis=0)
        axes.plot(x, 100 * smooth(mean), color=colour, linewidth=2, label=algorithm.replace("_", " "))
    axes.set(xlabel="episodes played", ylabel="solved (%)", ylim=(0, 100), title="Four tasks at once, answers drawn")
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(CURVES, dpi=120)


def smooth(numbers) -> np.ndarray:
    """Mean of an update with its neighbours: 64 episodes alone scatter by six points."""
    padded = np.pad(np.asarray(numbers, float), 1, mode="edge")
    return np.convolve(padded, np.ones(3) / 3, mode="valid")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--report", action="store_true")
    asked = parser.parse_args()
    if not asked.report:
        measure(asked.seeds, asked.episodes)
    report()


if __name__ == "__main__":
    main()
