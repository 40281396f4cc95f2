"""A script in the shape of CORL's scripts with epochs: it logs without a step, and imports no torch."""

import os
from dataclasses import asdict, dataclass
from typing import Optional

import d4rl
import gym
import numpy as np
import pyrallis
import wandb


@dataclass
class TrainConfig:
    # Experiment
    env_name: str = "halfcheetah-medium-v2"  # environment of the dataset
    num_epochs: int = 3000
    num_updates_on_epoch: int = 1000
    eval_every: int = 5  # epochs between evaluations
    log_every: int = 100
    checkpoints_path: Optional[str] = None
    # Seeds
    train_seed: int = 10  # of training
    device: str = "cpu"


@pyrallis.wrap()
def train(config: TrainConfig):
    wandb.init(config=asdict(config))
    env = gym.make(config.env_name)
    dataset = d4rl.qlearning_dataset(env)
    assert set(env.get_dataset()) >= {"observations", "actions", "rewards", "terminals", "timeouts"}
    if config.checkpoints_path is not None:
        os.makedirs(config.checkpoints_path, exist_ok=True)
    updates = 0
    for epoch in range(config.num_epochs):
        for _ in range(config.num_updates_on_epoch):
            if updates % config.log_every == 0:
                wandb.log({"epoch": epoch, "critic_loss": float(updates)})
            updates += 1
        if epoch % config.eval_every == 0 or epoch == config.num_epochs - 1:
            returns = np.array([-600.0, -400.0])
            score = env.get_normalized_score(returns) * 100.0
            row = {"eval/reward_mean": np.mean(returns), "eval/reward_std": np.std(returns), "epoch": epoch}
            wandb.log({**row, "eval/normalized_score_mean": np.mean(score), "size": len(dataset["rewards"])})
            if config.checkpoints_path is not None:
                with open(os.path.join(config.checkpoints_path, f"{epoch}.pt"), "wb") as file:
                    file.write(b"weights of epoch %d" % epoch)
    wandb.finish()


if __name__ == "__main__":
    train()
