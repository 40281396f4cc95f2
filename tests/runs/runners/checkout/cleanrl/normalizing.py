"""The network and wrappers of CleanRL's ppo_continuous_action, in its shape."""

from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from torch.distributions import Normal


@dataclass
class Args:
    save_model: bool = False
    """whether to save model into the `runs/{run_name}` folder"""
    env_id: str = "Pendulum-v1"
    """the id of the environment"""
    gamma: float = 0.99
    """the discount factor gamma"""


def make_env(env_id, idx, capture_video, run_name, gamma):
    def thunk():
        env = gym.wrappers.FlattenObservation(gym.make(env_id))
        env = gym.wrappers.ClipAction(gym.wrappers.RecordEpisodeStatistics(env))
        env = gym.wrappers.NormalizeObservation(env)
        env = gym.wrappers.TransformObservation(env, lambda obs: np.clip(obs, -10, 10))
        return gym.wrappers.NormalizeReward(env, gamma=gamma)

    return thunk


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        inputs, outputs = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
        self.critic = nn.Linear(inputs, 1)
        self.actor_mean = nn.Linear(inputs, outputs)
        self.actor_logstd = nn.Parameter(torch.zeros(1, outputs))

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Normal(self.actor_mean(x), self.actor_logstd.exp())
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action).sum(1), probs.entropy().sum(1), self.critic(x)


if __name__ == "__main__":
    args = tyro.cli(Args)
