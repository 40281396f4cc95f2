"""The network and arguments of CleanRL's c51, in its shape."""

from dataclasses import dataclass

import gymnasium as gym
import torch
import tyro
from torch import nn


@dataclass
class Args:
    env_id: str = "CartPole-v1"
    """the id of the environment"""
    n_atoms: int = 101
    """the number of atoms"""
    v_min: float = -100
    """the return lower bound"""
    v_max: float = 100
    """the return upper bound"""


def make_env(env_id, seed, idx, capture_video, run_name):
    return lambda: gym.make(env_id)


class QNetwork(nn.Module):
    def __init__(self, env, n_atoms=101, v_min=-100, v_max=100):
        super().__init__()
        self.n_atoms, self.n = n_atoms, env.single_action_space.n
        self.register_buffer("atoms", torch.linspace(v_min, v_max, steps=n_atoms))
        self.network = nn.Linear(env.single_observation_space.shape[0], self.n * n_atoms)

    def get_action(self, x, action=None):
        pmfs = torch.softmax(self.network(x).view(len(x), self.n, self.n_atoms), dim=2)
        if action is None:
            action = torch.argmax((pmfs * self.atoms).sum(2), 1)
        return action, pmfs[torch.arange(len(x)), action]


if __name__ == "__main__":
    args = tyro.cli(Args)
