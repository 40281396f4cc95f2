"""A script in the shape of CleanRL's dqn: it steps, reports and saves a Q-network, without the learning."""
# ruff: noqa: T201  scripts print

import os
import time
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment"""
    cuda: bool = True
    """if toggled, cuda will be enabled by default"""
    save_model: bool = False
    """whether to save model into the `runs/{run_name}` folder"""
    env_id: str = "CartPole-v1"
    """the id of the environment"""
    total_timesteps: int = 200
    """total timesteps of the experiments"""
    end_e: float = 0.5
    """the ending epsilon for exploration"""


def make_env(env_id, seed, idx, capture_video, run_name):
    def thunk():
        env = gym.wrappers.RecordEpisodeStatistics(gym.make(env_id))
        env.action_space.seed(seed)
        return env

    return thunk


class QNetwork(nn.Module):
    def __init__(self, env):
        super().__init__()
        inputs = int(np.array(env.single_observation_space.shape).prod())
        self.network = nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, env.single_action_space.n))

    def forward(self, x):
        return self.network(x)


if __name__ == "__main__":
    args = tyro.cli(Args)
    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    writer = SummaryWriter(f"runs/{run_name}")
    torch.manual_seed(args.seed)
    envs = gym.vector.SyncVectorEnv([make_env(args.env_id, args.seed, 0, False, run_name)])
    q_network = QNetwork(envs)
    obs, _ = envs.reset(seed=args.seed)
    for global_step in range(args.total_timesteps):
        actions = q_network(torch.Tensor(obs)).argmax(1).numpy()
        obs, rewards, terminations, truncations, infos = envs.step(actions)
        for info in infos.get("final_info", ()):
            if info and "episode" in info:
                print(f"global_step={global_step}, episodic_return={info['episode']['r']}")
                writer.add_scalar("charts/episodic_return", info["episode"]["r"], global_step)
                writer.add_scalar("charts/episodic_length", info["episode"]["l"], global_step)
    if args.save_model:
        model_path = f"runs/{run_name}/{args.exp_name}.cleanrl_model"
        torch.save(q_network.state_dict(), model_path)
        print(f"model saved to {model_path}")
    envs.close()
    writer.close()
