"""The network of CleanRL's ppo, in its shape. Like that script, it has no argument `save_model`."""

from dataclasses import dataclass

import gymnasium as gym
import tyro
from torch import nn
from torch.distributions import Categorical


@dataclass
class Args:
    env_id: str = "CartPole-v1"
    """the id of the environment"""


def make_env(env_id, idx, capture_video, run_name):
    return lambda: gym.make(env_id)


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        inputs = envs.single_observation_space.shape[0]
        self.critic = nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 1))
        self.actor = nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, envs.single_action_space.n))

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


if __name__ == "__main__":
    args = tyro.cli(Args)
