"""A policy with slow inference, with synchronous and asynchronous collection.

Here it sleeps, like one that waits for a remote GPU. Synchronously, collecting and learning add up; asynchronously
they overlap. Every step records how many updates old its weights were.

    python examples/slow_policy.py
"""

import time

import torch
from torch import nn

from palaestra.actor import AsyncConfig
from palaestra.env import as_vector_env
from palaestra.learner import PPO
from palaestra.policy import ActorCritic
from palaestra.train import Trainer


class SlowNetwork(nn.Module):
    """Small, but far away: `thinking` seconds per call that acts, and as long per minibatch that learns."""

    def __init__(self, inputs: int, outputs: int, thinking: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, outputs + 1))
        self.thinking = thinking

    def forward(self, observation):
        time.sleep(self.thinking)
        out = self.body(observation)
        return out[:, :-1], out[:, -1]


def train(asynchronous: AsyncConfig | None, updates: int, thinking: float, seed: int):
    torch.manual_seed(seed)
    env = as_vector_env("CartPole-v1", num_envs=4)
    policy = ActorCritic(env.observation_space, env.action_space, network=SlowNetwork(4, 2, thinking))
    # 16 steps are 17 inferences; 4 epochs of 4 minibatches are 16: collecting and learning take about equally long.
    trainer = Trainer(policy, env, PPO(n_epochs=4, batch_size=16), seed=seed, asynchronous=asynchronous)
    began = time.perf_counter()
    history = trainer.train(total_timesteps=updates * 16 * 4, rollout_length=16)
    env.close()
    return time.perf_counter() - began, history


def main(updates: int = 12, thinking: float = 0.01, seed: int = 0):
    synchronous, _ = train(None, updates, thinking, seed)
    asynchronous, history = train(AsyncConfig(max_staleness=1), updates, thinking, seed)
    last = history[-1]
    ratio = synchronous / asynchronous
    print(f"synchronous {synchronous:.1f} s, asynchronous {asynchronous:.1f} s: {ratio:.2f} times as fast")
    print(
        f"staleness {last['staleness']:.2f}, collector busy {last['collector_utilisation']:.0%}, "
        f"learner busy {last['learner_utilisation']:.0%}"
    )
    return synchronous, asynchronous, history


if __name__ == "__main__":
    main()
