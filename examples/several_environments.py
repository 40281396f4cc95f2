"""Collect apart, learn together: four trainers share one policy, each with environments and randomness of its own.

The rollouts come from different environments, so `combine_rollouts` sets them side by side and no advantage leaks from
one into another. An update by any trainer changes the policy that all four act with.

    python examples/several_environments.py
"""

from palaestra.env import as_vector_env
from palaestra.experience import combine_rollouts
from palaestra.learner import PPO
from palaestra.policy import ActorCritic
from palaestra.train import Trainer


def main(rounds: int = 30, num_trainers: int = 4, n_steps: int = 128, seed: int = 0):
    envs = [as_vector_env("CartPole-v1", num_envs=2) for _ in range(num_trainers)]
    policy = ActorCritic(envs[0].observation_space, envs[0].action_space, seed=seed)
    algorithm = PPO(learning_rate=5e-4, n_epochs=6, batch_size=128, gamma=0.98, gae_lambda=0.9)
    trainers = [Trainer(policy, env, algorithm, seed=seed + i) for i, env in enumerate(envs)]

    returns = []
    for round_ in range(rounds):
        rollouts = [trainer.collect_rollouts(n_steps) for trainer in trainers]
        # One of them learns, always the same: the optimiser's memory is part of it.
        trainers[0].learn(combine_rollouts(rollouts))

        latest = [r for trainer in trainers for r in list(trainer.episode_rewards)[-10:]]
        returns.append(sum(latest) / max(1, len(latest)))
        if round_ % 5 == 4:
            print(f"round {round_ + 1}: mean return {returns[-1]:.1f}")
    for env in envs:
        env.close()
    return returns


if __name__ == "__main__":
    main()
