"""Policies on transitions whose networks are linear with given weights, and batches of few transitions."""

import numpy as np
import torch
from gymnasium import spaces

from palaestra.experience.replay import TransitionBatch
from palaestra.policy.config import PolicyConfig

NUMBER = spaces.Box(-100.0, 100.0, (1,), np.float32)
UNIT = spaces.Box(-1.0, 1.0, (1,), np.float32)


def linear_policy(cls, action_space=UNIT, **weights):
    """A policy without hidden layers; `actor=[[2.0]]` sets the weights of `actor`, a pair those of both critics.

    Biases are zero.
    """
    policy = cls(NUMBER, action_space, PolicyConfig(name=cls.name, hidden=(), activation="relu"))
    with torch.no_grad():
        for name, given in weights.items():
            part = getattr(policy, name)
            networks = [(part[0], given)] if not isinstance(given, tuple) else list(zip(part, given, strict=True))
            for network, matrix in networks:
                layer = network if isinstance(network, torch.nn.Linear) else network[0]
                layer.weight.copy_(torch.tensor(matrix))
                layer.bias.zero_()
    return policy


def rows(observation=(3.0,), action=(0.5,), reward=(1.0,), following=(2.0,), terminated=(False,), noise=None):
    """One minibatch as tensors."""
    batch = {
        "observation": torch.tensor(observation)[:, None],
        "action": torch.tensor(action) if isinstance(action[0], int) else torch.tensor(action)[:, None],
        "reward": torch.tensor(reward),
        "next_observation": torch.tensor(following)[:, None],
        "terminated": torch.tensor(terminated),
    }
    return batch if noise is None else {**batch, "noise": torch.tensor(noise)[:, :, None]}


def random_batch(policy, steps=4, size=8, seed=0):
    """Transitions `[steps, size]` that fit a policy."""
    rng = np.random.default_rng(seed)
    shape = policy.observation_space.shape
    if isinstance(policy.action_space, spaces.Discrete):
        action = rng.integers(0, int(policy.action_space.n), (steps, size))
    else:
        action = rng.uniform(-1, 1, (steps, size, *policy.action_space.shape)).astype(np.float32)
    return TransitionBatch(
        {
            "observation": rng.standard_normal((steps, size, *shape), dtype=np.float32),
            "action": action,
            "reward": rng.standard_normal((steps, size), dtype=np.float32),
            "next_observation": rng.standard_normal((steps, size, *shape), dtype=np.float32),
            "terminated": rng.random((steps, size)) < 0.2,
        }
    )
