"""Train CartPole with PPO: the three objects there are, and the one call that drives them.

python examples/basic_training.py
"""

from palaestra.env import EnvConfig, make_env
from palaestra.learner import PPO
from palaestra.policy import ActorCritic
from palaestra.train import Trainer


def main(total_timesteps: int = 60_000, rollout_length: int = 128, log_interval: int = 10, seed: int = 0):
    env = make_env(EnvConfig(id="CartPole-v1", num_envs=8))
    policy = ActorCritic(env.observation_space, env.action_space, seed=seed)
    algorithm = PPO(learning_rate=1e-3, n_epochs=10, batch_size=256, gamma=0.98, gae_lambda=0.9, entropy_coef=0.0)
    trainer = Trainer(policy, env, algorithm, seed=seed)

    history = trainer.train(total_timesteps, rollout_length=rollout_length, log_interval=log_interval)

    for metrics in history:
        print(f"step {metrics['env_step']:>7.0f}   mean return of the last episodes {metrics['episode_return']:6.1f}")
    env.close()
    return history


if __name__ == "__main__":
    main()
