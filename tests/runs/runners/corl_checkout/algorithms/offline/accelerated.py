"""A script in the shape of CORL's scripts for JAX, which is not installed here. It is described and never run."""

from dataclasses import dataclass

import d4rl  # noqa: F401
import gym  # noqa: F401
import jax
import pyrallis
import wandb  # noqa: F401


@dataclass
class Config:
    # name of the dataset
    dataset_name: str = "halfcheetah-medium-v2"
    num_epochs: int = 1000
    num_updates_on_epoch: int = 1000
    train_seed: int = 0


@pyrallis.wrap()
def main(config: Config):
    jax.tree_map(abs, [config.train_seed])


if __name__ == "__main__":
    main()
