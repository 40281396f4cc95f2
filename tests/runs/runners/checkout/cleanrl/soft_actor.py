"""The actor of CleanRL's sac, in its shape. Like that script, it has no argument `save_model`."""

from dataclasses import dataclass

import gymnasium as gym
import torch
import tyro
from torch import nn


@dataclass
class Args:
    env_id: str = "Pendulum-v1"
    """the id of the environment"""


def make_env(env_id, seed, idx, capture_video, run_name):
    return lambda: gym.make(env_id)


class Actor(nn.Module):
    def __init__(self, env):
        super().__init__()
        inputs, space = env.single_observation_space.shape[0], env.single_action_space
        self.fc_mean = nn.Linear(inputs, space.shape[0])
        self.fc_logstd = nn.Linear(inputs, space.shape[0])
        self.register_buffer("action_scale", torch.tensor((space.high - space.low) / 2.0, dtype=torch.float32))
        self.register_buffer("action_bias", torch.tensor((space.high + space.low) / 2.0, dtype=torch.float32))

    def get_action(self, x):
        mean, log_std = self.fc_mean(x), torch.tanh(self.fc_logstd(x))
        normal = torch.distributions.Normal(mean, log_std.exp())
        x_t = normal.rsample()
        action = torch.tanh(x_t) * self.action_scale + self.action_bias
        mean = torch.tanh(mean) * self.action_scale + self.action_bias
        return action, normal.log_prob(x_t).sum(1, keepdim=True), mean


if __name__ == "__main__":
    args = tyro.cli(Args)
