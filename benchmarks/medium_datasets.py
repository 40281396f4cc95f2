"""Make the medium datasets of the offline benchmark: steps of half-trained PPO policies, below `$PALAESTRA_HOME`.

Each behaviour is a run of PPO whose checkpoints are kept; one checkpoint from the middle of its learning curve records
the data, a later one is the expert of the normalised scores. Everything is seeded. Takes about ten minutes on one core.

    python -m benchmarks.medium_datasets
    python -m benchmarks.offline --checkout CORL --datasets pendulum/medium-v0 lander/medium-v0 halfcheetah/medium-v0
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from palaestra.experience.datasets import list_datasets
from palaestra.files.home import Home

CONFIGS = Path(__file__).parents[1] / "configs" / "ppo"


@dataclass(frozen=True)
class Medium:
    """A dataset, and the run of PPO whose checkpoints record it."""

    dataset_id: str
    config: str
    overrides: tuple[str, ...]
    medium: int
    """Update of the checkpoint that acts."""
    expert: int
    """Update of the checkpoint whose return is the expert score."""
    steps: int

    @property
    def run_name(self) -> str:
        return f"behaviour-{self.dataset_id.partition('/')[0]}"


DATASETS = (
    Medium("pendulum/medium-v0", "pendulum", ("trainer.checkpoint_every=1",), 8, 25, 100_000),
    Medium(
        "lander/medium-v0",
        "lunarlander",
        ("env.id=LunarLanderContinuous-v3", "trainer.checkpoint_every=4", "trainer.total_timesteps=540000"),
        12,
        32,
        100_000,
    ),
    Medium(
        "halfcheetah/medium-v0",
        "halfcheetah",
        # The length decides the schedule of the learning rate, so the run is planned for twice the usual one.
        ("trainer.checkpoint_every=20", "trainer.total_timesteps=2000000"),
        80,
        300,
        200_000,
    ),
)


def call(*arguments: object) -> None:
    """Run the command line."""
    subprocess.run([sys.executable, "-m", "palaestra", *map(str, arguments)], check=True)


def find_checkpoint(dataset: Medium, update: int) -> Path:
    """A checkpoint of the newest run of the behaviour."""
    checkpoints = sorted(Home.default().runs.glob(f"{dataset.run_name}-*/attempt_*/checkpoints/update_{update:08d}"))
    return checkpoints[-1]


def main() -> None:
    """Make what is missing."""
    present = {summary.dataset_id for summary in list_datasets(Home.default().datasets)}
    for dataset in DATASETS:
        if dataset.dataset_id in present:
            continue
        keep = ("trainer.keep_checkpoints=1000", f"name={dataset.run_name}", "--seed", 1, "--quiet")
        call("train", CONFIGS / f"{dataset.config}.yaml", *dataset.overrides, *keep)
        acting, expert = find_checkpoint(dataset, dataset.medium), find_checkpoint(dataset, dataset.expert)
        source = ("--checkpoint", acting, "--stochastic", "--steps", dataset.steps, "--seed", 1)
        call("datasets", "create", dataset.dataset_id, *source, "--expert-checkpoint", expert)


if __name__ == "__main__":
    main()
