"""A script in the shape of CleanRL's: its way to take arguments, step environments and report, without the learning."""
# ruff: noqa: T201  scripts print

import os
import time
from dataclasses import dataclass

import gymnasium as gym
import tyro
from cleanrl_utils.seeding import seeded
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    """the name of this experiment"""
    seed: int = 1
    """seed of the experiment"""
    cuda: bool = True
    """if toggled, cuda will be enabled by default"""
    track: bool = False
    """if toggled, this experiment will be tracked with Weights and Biases"""
    wandb_entity: str = None
    """the entity (team) of wandb's project"""
    capture_video: bool = False
    """whether to capture videos"""
    save_model: bool = False
    """whether to save model into the `runs/{run_name}` folder"""

    env_id: str = "CartPole-v1"
    """the id of the environment"""
    total_timesteps: int = int(1e3)
    """total timesteps of the experiments"""
    learning_rate: float = 2.5e-4
    """the learning rate of the optimizer"""
    num_envs: int = 2
    """the number of parallel game environments"""

    # to be filled in runtime
    num_iterations: int = 0
    """the number of iterations (computed in runtime)"""


if __name__ == "__main__":
    args = tyro.cli(Args)
    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    writer = SummaryWriter(f"runs/{run_name}")
    writer.add_text("hyperparameters", "|param|value|\n|-|-|\n")
    rng = seeded(args.seed)
    envs = gym.vector.SyncVectorEnv(
        [lambda: gym.wrappers.RecordEpisodeStatistics(gym.make(args.env_id)) for _ in range(args.num_envs)]
    )
    obs, _ = envs.reset(seed=args.seed)
    args.num_iterations = args.total_timesteps // args.num_envs
    for global_step in range(0, args.total_timesteps, args.num_envs):
        actions = rng.integers(envs.single_action_space.n, size=args.num_envs)
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        if "final_info" in infos:
            for i, info in enumerate(infos["final_info"]):
                if info and "episode" in info:
                    assert infos["final_observation"][i].shape == obs[i].shape
                    print(f"global_step={global_step}, episodic_return={info['episode']['r']}")
                    writer.add_scalar("charts/episodic_return", info["episode"]["r"], global_step)
                    writer.add_scalar("charts/episodic_length", info["episode"]["l"], global_step)
        obs = next_obs
        if global_step % 100 == 0:
            writer.add_scalar("losses/td_loss", args.learning_rate * global_step, global_step)
            writer.add_scalar("charts/SPS", 1000, global_step)
            print("SPS:", 1000)
    if args.save_model:
        model_path = f"runs/{run_name}/{args.exp_name}.cleanrl_model"
        with open(model_path, "wb") as file:
            file.write(b"weights")
        print(f"model saved to {model_path}")
    envs.close()
    writer.close()
