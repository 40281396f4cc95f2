"""A training loop of your own: collect five rollouts, combine them, learn once.

`collect_rollouts` and `learn` are what `train` is made of; each may be called alone. The five rollouts follow on one
another, so `combine_rollouts` makes them one long rollout: advantages are computed along it when it is learned from.

    python examples/custom_loop.py
"""

from palaestra.env import as_vector_env
from palaestra.experience import combine_rollouts
from palaestra.learner import PPO
from palaestra.policy import ActorCritic
from palaestra.train import Trainer


def main(rounds: int = 10, rollouts_per_round: int = 5, n_steps: int = 128, seed: int = 0):
    env = as_vector_env("CartPole-v1")
    policy = ActorCritic(env.observation_space, env.action_space, seed=seed)
    trainer = Trainer(policy, env, PPO(learning_rate=1e-3, batch_size=256, gamma=0.98), seed=seed)

    history = []
    for round_ in range(rounds):
        rollouts = [trainer.collect_rollouts(n_steps) for _ in range(rollouts_per_round)]
        combined = combine_rollouts(rollouts)
        metrics = trainer.learn(combined)

        mean_return = sum(trainer.episode_rewards) / max(1, len(trainer.episode_rewards))
        print(
            f"round {round_}: {tuple(combined.batch_size)} steps, loss {metrics['loss']:.2f}, return {mean_return:.1f}"
        )
        history.append(metrics | {"steps": float(combined.numel()), "episode_return": mean_return})
    env.close()
    return history


if __name__ == "__main__":
    main()
