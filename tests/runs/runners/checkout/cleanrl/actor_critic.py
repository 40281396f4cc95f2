"""The networks of CleanRL's ddpg, td3 and sac, in their shape: all three name their actor `Actor`."""

from dataclasses import dataclass

import gymnasium as gym
import torch
import tyro
from torch import nn


@dataclass
class Args:
    save_model: bool = False
    """whether to save model into the `runs/{run_name}` folder"""
    env_id: str = "Pendulum-v1"
    """the id of the environment"""
    exploration_noise: float = 0.1
    """the scale of exploration noise"""


def make_env(env_id, seed, idx, capture_video, run_name):
    return lambda: gym.make(env_id)


class QNetwork(nn.Module):
    def __init__(self, env):
        super().__init__()
        self.fc1 = nn.Linear(env.single_observation_space.shape[0] + env.single_action_space.shape[0], 1)

    def forward(self, x, a):
        return self.fc1(torch.cat([x, a], 1))


class Actor(nn.Module):
    """As in ddpg, whose scale has a row for each environment of the training."""

    def __init__(self, env):
        super().__init__()
        space = env.action_space
        self.fc_mu = nn.Linear(env.single_observation_space.shape[0], env.single_action_space.shape[0])
        self.register_buffer("action_scale", torch.tensor((space.high - space.low) / 2.0, dtype=torch.float32))
        self.register_buffer("action_bias", torch.tensor((space.high + space.low) / 2.0, dtype=torch.float32))

    def forward(self, x):
        return torch.tanh(self.fc_mu(x)) * self.action_scale + self.action_bias


if __name__ == "__main__":
    args = tyro.cli(Args)
