"""Playing while learning against playing and learning in turn, on screens, at equal episodes: time and success.

`python -m benchmarks.ui_async` trains the built-in tiny model with PPO and with GRPO on four tasks, in turn and in the
background with its sampler in a separate process, rounds alternating. The clock runs from the first to the last
update, so that loading and starting browsers, which both do once, stay out. Ends are played on held-out seeds. Writes
benchmarks/results/ui_async.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import ui_learning
from benchmarks.machine import facts, load
from benchmarks.ui_runs import add_tasks, count_solved, evaluate_held_out, format_share, list_checkpoints, train_model
from palaestra.files.run_directory import RunDirectory

RESULTS = Path(__file__).parent / "results"
LANES = {
    "in turn": {"trainer": {"collection": "synchronous"}},
    "in the background": {
        "trainer": {"collection": "asynchronous", "max_staleness": 1}, "inference": {"backend": "process"},
    },
}  # fmt: skip
ALGORITHMS = {"grpo": {"name": "grpo", "group_size": 8}, "ppo": {"name": "ppo"}}


def build_config(lane: str, algorithm: str, updates: int) -> dict:
    """The configuration of one run."""
    base = ui_learning.CONFIG
    trainer = base["trainer"] | LANES[lane]["trainer"] | {"num_training_steps": updates, "decay_updates": updates}
    extra = {key: value for key, value in LANES[lane].items() if key != "trainer"}
    return base | extra | {"trainer": trainer, "algorithm": ALGORITHMS[algorithm]}


def seconds(run: RunDirectory) -> tuple[float, float]:
    """From the first update to the last, and the mean staleness of what was learned from."""
    lines = run.attempts()[-1].journal.read_text().splitlines()
    steps = [record for line in lines if (record := json.loads(line))["kind"] == "TrainingStep"]
    stale = float(np.mean([step["metrics"].get("staleness", 0.0) for step in steps]))
    return steps[-1]["time"] - steps[0]["time"], stale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--episodes", type=int, default=160)
    asked = parser.parse_args()
    found = {"machine": facts(), "updates": asked.updates, "runs": []}
    with tempfile.TemporaryDirectory(prefix="palaestra-ui-async-") as directory:
        home = Path(directory)
        for number in range(1, asked.rounds + 1):
            for algorithm in ALGORITHMS:
                for lane in LANES:
                    run = train_model(build_config(lane, algorithm, asked.updates), number, home)
                    took, stale = seconds(run)
                    document = evaluate_held_out(list_checkpoints(run)[-1], asked.episodes, home)
                    after = add_tasks(count_solved(document))
                    one = {"algorithm": algorithm, "lane": lane, "seed": number, "seconds": took, "staleness": stale,
                           "solved": after, "load": load()}  # fmt: skip
                    found["runs"].append(one)
                    print(json.dumps(one), flush=True)
                    (RESULTS / "ui_async.json").write_text(json.dumps(found, indent=1) + "\n")
                    (RESULTS / "ui_async.md").write_text(table(found["runs"]))


def table(runs: list[dict]) -> str:
    lines = [
        "| algorithm | collection | seconds (median) | against in turn | staleness | solved after, % |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for algorithm in ALGORITHMS:
        medians = {}
        for lane in LANES:
            own = [run for run in runs if (run["algorithm"], run["lane"]) == (algorithm, lane)]
            if not own:
                continue
            medians[lane] = float(np.median([run["seconds"] for run in own]))
            pooled = tuple(int(n) for n in np.sum([run["solved"] for run in own], axis=0))
            stale = np.mean([run["staleness"] for run in own])
            ratio = medians["in turn"] / medians[lane]
            lines.append(
                f"| {algorithm} | {lane} | {medians[lane]:.0f} | {ratio:.2f}x | {stale:.2f} | {format_share(pooled)} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
