"""A script in the shape of CORL's: imitates the dataset with a linear policy, and logs every update."""

import os
import random
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Optional, Tuple

import d4rl
import gym
import numpy as np
import pyrallis
import torch
import torch.nn as nn
import wandb


@dataclass
class TrainConfig:
    # wandb project name
    project: str = "trial"
    # wandb run name
    name: str = "regression"
    # training dataset and evaluation environment
    env: str = "halfcheetah-medium-v2"
    # step size of the optimizer, which is
    # the same for all layers
    learning_rate: float = 1e-3
    # coefficients of the optimizer
    betas: Tuple[float, float] = (0.9, 0.999)
    # total gradient updates during training
    max_timesteps: int = int(1e6)
    # maximum size of the replay buffer
    buffer_size: int = 2_000_000
    batch_size: int = 64
    discount: float = 0.99
    # share of the best episodes to imitate
    frac: float = 0.1
    # whether to normalize states
    normalize: bool = True
    # evaluation frequency
    eval_freq: int = int(5e3)
    n_episodes: int = 2
    checkpoints_path: Optional[str] = None
    load_model: str = ""
    seed: int = 0
    device: str = "cuda"

    def __post_init__(self):
        self.name = f"{self.name}-{self.env}-{str(uuid.uuid4())[:8]}"
        if self.checkpoints_path is not None:
            self.checkpoints_path = os.path.join(self.checkpoints_path, self.name)


class Actor(nn.Module):
    def __init__(self, state_dim: int, action_dim: int, max_action: float):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(state_dim, action_dim), nn.Tanh())
        self.max_action = max_action

    def forward(self, state):
        return self.max_action * self.net(state)

    @torch.no_grad()
    def act(self, state, device="cpu"):
        state = torch.tensor(state.reshape(1, -1), device=device, dtype=torch.float32)
        return self(state).cpu().numpy().flatten()


def wrap_env(env, state_mean=0.0, state_std=1.0, reward_scale=1.0):
    env = gym.wrappers.TransformObservation(env, lambda state: (state - state_mean) / state_std)
    if reward_scale != 1.0:
        env = gym.wrappers.TransformReward(env, lambda reward: reward_scale * reward)
    return env


def eval_actor(env: gym.Env, actor, n_episodes, seed):
    env.seed(seed)
    returns = []
    for _ in range(n_episodes):
        state, done, total = env.reset(), False, 0.0
        while not done:
            state, reward, done, _ = env.step(actor.act(state))
            total += reward
        returns.append(total)
    return np.asarray(returns)


@pyrallis.wrap()
def train(config: TrainConfig):
    env = gym.make(config.env)
    dataset = d4rl.qlearning_dataset(env)
    print(f"Dataset size: {len(dataset['rewards'])}")
    states = dataset["observations"]
    mean, std = (states.mean(0), states.std(0) + 1e-3) if config.normalize else (0.0, 1.0)
    states = torch.tensor((states - mean) / std)
    actions = torch.tensor(dataset["actions"])
    env = wrap_env(env, mean, std)
    env.seed(config.seed)
    env.action_space.seed(config.seed)
    random.seed(config.seed)
    np.random.seed(config.seed)
    torch.manual_seed(config.seed)
    actor = Actor(states.shape[1], env.action_space.shape[0], float(env.action_space.high[0]))
    optimizer = torch.optim.Adam(actor.parameters(), lr=config.learning_rate, betas=tuple(config.betas))
    if config.checkpoints_path is not None:
        os.makedirs(config.checkpoints_path, exist_ok=True)
    total_it = 0
    if config.load_model != "":
        saved = torch.load(Path(config.load_model))
        actor.load_state_dict(saved["actor"])
        total_it = saved["total_it"]
    wandb.init(config=asdict(config), project=config.project, name=config.name, id=str(uuid.uuid4()))
    wandb.run.save()
    for t in range(int(config.max_timesteps)):
        index = np.random.randint(0, len(states), size=config.batch_size)
        loss = ((actor(states[index]) - actions[index]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        row = {"actor_loss": loss.item()}
        if t % 2:
            row["odd_loss"] = 2.0 * t
        total_it += 1
        wandb.log(row, step=total_it)
        if (t + 1) % config.eval_freq == 0:
            score = eval_actor(env, actor, config.n_episodes, config.seed).mean()
            normalized = env.get_normalized_score(score) * 100.0
            print(f"Evaluation over {config.n_episodes} episodes: {score:.3f} , D4RL score: {normalized:.3f}")
            if config.checkpoints_path is not None:
                saved = {"actor": actor.state_dict(), "optimizer": optimizer.state_dict(), "total_it": total_it}
                torch.save(saved, os.path.join(config.checkpoints_path, f"checkpoint_{t}.pt"))
            wandb.log({"d4rl_normalized_score": normalized}, step=total_it)


if __name__ == "__main__":
    train()
