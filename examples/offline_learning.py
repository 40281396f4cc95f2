"""Learn from transitions: DQN with a replay buffer, a dataset of what it does, and a clone that never acted.

python examples/offline_learning.py
"""

import os
import tempfile
from pathlib import Path

from palaestra.files.home import Home
from palaestra.train import config_from, evaluate_checkpoint, train
from palaestra.train.collection.collect import Amount
from palaestra.train.collection.create import CollectionPlan, collect_dataset


def main(total_timesteps: int = 20_000, dataset_steps: int = 5_000, updates: int = 2_000, episodes: int = 20):
    with tempfile.TemporaryDirectory() as directory:
        os.environ["PALAESTRA_HOME"] = directory
        runs = Home.default().runs
        quiet = {"telemetry": {"progress": False}}

        online = config_from(
            {
                "env": {"id": "CartPole-v1"},
                "policy": {"hidden": [64, 64]},
                "algorithm": {
                    "name": "dqn",
                    "learning_rate": 1e-3,
                    "batch_size": 64,
                    "train_freq": 16,
                    "gradient_steps": 16,
                    "target_interval": 200,
                    "exploration_fraction": 0.3,
                },
                "trainer": {"device": "cpu", "total_timesteps": total_timesteps},
                **quiet,
            }
        )
        expert = train(online, root=runs, run_id="expert").checkpoint
        plan = CollectionPlan(
            dataset_id="cartpole/dqn-v0",
            amount=Amount(steps=dataset_steps),
            checkpoint=expert,
            expert_checkpoint=expert,
        )
        collect_dataset(Home.default(), plan)

        offline = config_from(
            {
                "dataset": {"id": "cartpole/dqn-v0"},
                "policy": {"hidden": [64, 64]},
                "algorithm": {"name": "bc", "learning_rate": 1e-3},
                "trainer": {"device": "cpu", "updates": updates},
                **quiet,
            }
        )
        clone = train(offline, root=runs, run_id="clone").checkpoint

        returns = {name: mean_return(path, episodes) for name, path in (("DQN", expert), ("its clone", clone))}
    for name, number in returns.items():
        print(f"{name}: mean return {number:.1f}")
    return returns


def mean_return(checkpoint: Path, episodes: int) -> float:
    return evaluate_checkpoint(checkpoint, episodes=episodes, seed=None).mean_return


if __name__ == "__main__":
    main()
