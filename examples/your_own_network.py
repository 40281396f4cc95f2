"""A network of your own: any `nn.Module` that gives the distribution's parameters and a value.

`ActorCritic` around it knows what the parameters mean for the action space, so acting, learning and saving stay as
they are. From a configuration the same class is named by its address: `policy.name: your_package.networks:SharedTrunk`.

    python examples/your_own_network.py
"""

import torch
from torch import Tensor, nn

from palaestra.env import as_vector_env
from palaestra.learner import PPO
from palaestra.policy import ActorCritic
from palaestra.train import Trainer


class SharedTrunk(nn.Module):
    """Actor and critic on one body with layer normalisation and a skip connection."""

    def __init__(self, observation_space, action_space, width: int = 64) -> None:
        super().__init__()
        self.enter = nn.Linear(observation_space.shape[0], width)
        self.body = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU())
        self.parameters_of_the_action = nn.Linear(width, int(action_space.n))
        self.value = nn.Linear(width, 1)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        entered = torch.tanh(self.enter(observation))
        seen = entered + self.body(entered)
        return self.parameters_of_the_action(seen), self.value(seen).squeeze(-1)


def main(total_timesteps: int = 40_000, rollout_length: int = 128, seed: int = 0):
    torch.manual_seed(seed)  # your own layers draw their first weights from torch
    env = as_vector_env("CartPole-v1")
    network = SharedTrunk(env.observation_space, env.action_space)
    policy = ActorCritic(env.observation_space, env.action_space, network=network)
    algorithm = PPO(learning_rate=1e-3, batch_size=256, n_epochs=6, gamma=0.98, gae_lambda=0.9)
    trainer = Trainer(policy, env, algorithm, seed=seed)

    history = trainer.train(total_timesteps, rollout_length=rollout_length)

    print(f"mean return at first {history[0]['episode_return']:.1f}, at last {history[-1]['episode_return']:.1f}")
    env.close()
    return history


if __name__ == "__main__":
    main()
