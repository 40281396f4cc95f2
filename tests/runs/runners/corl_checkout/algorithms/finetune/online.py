"""A script in the shape of CORL's fine-tuning: it counts from 0, and then acts in the environment."""

from dataclasses import asdict, dataclass
from typing import Optional

import d4rl
import gym
import pyrallis
import wandb


@dataclass
class TrainConfig:
    env_name: str = "halfcheetah-medium-v2"
    seed: int = 42
    offline_iterations: int = int(1e6)
    online_iterations: int = int(1e6)
    eval_frequency: int = 1000
    checkpoints_path: Optional[str] = None
    device: str = "cuda"


@pyrallis.wrap()
def train(config: TrainConfig):
    env = gym.make(config.env_name)
    d4rl.qlearning_dataset(env)
    wandb.init(config=asdict(config))
    env.seed(config.seed)
    env.reset()
    steps, total = 0, 0.0
    env.action_space.seed(config.seed)
    for t in range(config.offline_iterations + config.online_iterations):
        row = {"critic_loss": 1.0}
        if t >= config.offline_iterations:
            _, reward, done, info = env.step(env.action_space.sample())
            steps, total = steps + 1, total + reward
            if done:
                assert steps == env._max_episode_steps
                assert info["TimeLimit.truncated"]
                score = env.get_normalized_score(total) * 100.0
                row["train/d4rl_normalized_episode_return"] = score
                row["train/episode_return"], row["train/episode_length"] = total, steps
                env.reset()
                steps, total = 0, 0.0
        wandb.log(row, step=t)
        if (t + 1) % config.eval_frequency == 0:
            score = -(t + 1.0)
            wandb.log({"eval/eval_score": score}, step=t)
            wandb.log({"eval/d4rl_normalized_score": env.get_normalized_score(score) * 100.0}, step=t)


if __name__ == "__main__":
    train()
