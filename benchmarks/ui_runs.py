"""Training and evaluation of UI agents for benchmarks: each in a process of its own, below one home directory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from palaestra.evaluation.statistics import wilson_interval
from palaestra.files.atomic import write_text
from palaestra.files.run_directory import RunDirectory

ALGORITHMS = {
    "rejection_sampling": {"name": "rejection_sampling"},
    "grpo": {"name": "grpo", "group_size": 8},
    "ppo": {"name": "ppo"},
}
COLOURS = {"rejection_sampling": "#8e44ad", "grpo": "#2980b9", "ppo": "#d35400"}


def run_palaestra(home: Path, *words: object) -> dict:
    """The JSON that a `palaestra` command prints; its error output if it fails."""
    command = [sys.executable, "-m", "palaestra", *map(str, words), "--json"]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, "PALAESTRA_HOME": str(home)}
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


def train_model(config: dict, seed: int, home: Path, start: Path | None = None) -> RunDirectory:
    """Train in a separate process, from the weights of the checkpoint `start` if there is one."""
    file = home / "config.json"
    file.write_text(json.dumps(config))
    warm_start = () if start is None else ("--warm-start", start)
    document = run_palaestra(home, "train", file, f"trainer.seed={seed}", *warm_start, "--quiet")
    return RunDirectory.find(document["run_id"], home / "var" / "training" / "runs")


def list_checkpoints(run: RunDirectory) -> list[Path]:
    """Checkpoints of the last attempt; the first has the weights before training."""
    return sorted(run.attempts()[-1].checkpoints.glob("update_*"))


def evaluate_held_out(checkpoint: Path, episodes: int, home: Path, *, greedy: bool = False, seed: int = 0) -> dict:
    """The document of `palaestra eval` on held-out seeds from `seed`, which are the same for every checkpoint."""
    way = "--greedy" if greedy else "--sample"
    return run_palaestra(home, "eval", checkpoint, "--episodes", episodes, "--seed", seed, way)


def write_results(file: Path, results: dict) -> None:
    """Write results atomically: hours of measurements are in the file before. Lists of numbers stay on one line."""
    text = json.dumps(results, indent=1)
    short = re.sub(r"\[[^\[\]{}]*\]", lambda match: re.sub(r"\s+", " ", match[0]), text)
    write_text(file, short + "\n")


def count_solved(document: dict) -> dict[str, list[int]]:
    """Successes and episodes by task."""
    return {task: [one["successes"], one["episodes"]] for task, one in document["per_task"].items()}


def read_training_steps(run: RunDirectory) -> list[dict[str, float]]:
    """The metrics of each update."""
    lines = run.attempts()[-1].journal.read_text().splitlines()
    return [record["metrics"] for line in lines if (record := json.loads(line))["kind"] == "TrainingStep"]


def add_tasks(by_task: dict[str, list[int]]) -> tuple[int, int]:
    """Successes and episodes over all tasks."""
    successes, episodes = np.sum(list(by_task.values()), axis=0)
    return int(successes), int(episodes)


def format_share(counts: Sequence[int]) -> str:
    """The share of successes and its 95 % interval, in per cent."""
    low, high = wilson_interval(*counts)
    return f"{100 * counts[0] / counts[1]:.0f} ({100 * low:.0f} to {100 * high:.0f})" if counts[1] else "–"


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row has the titles."""
    title, *others = rows
    return "".join(f"| {' | '.join(row)} |\n" for row in (title, ["---"] * len(title), *others))
