"""A curriculum: the task gets harder as soon as the agent is good at it.

Override one half of the trainer and `train` goes through it. The gate of this toy opens after the right lever was held
`difficulty` times in a row; chance alone opens it once in 2**difficulty tries, so starting with the hard one teaches
nothing for a long time.

    python examples/curriculum.py
"""

import numpy as np

from palaestra import ActorCritic, PPOTrainer, as_vector_env
from palaestra.env.toy import Gate


class CurriculumTrainer(PPOTrainer):
    """Raises the difficulty when nearly every one of the latest episodes succeeded."""

    level = 1
    hardest = 8

    def collect_rollouts(self, n_steps):
        if self.level < self.hardest and len(self.episode_rewards) >= 50 and np.mean(self.episode_rewards) > 0.9:
            self.level += 1
            self.episode_rewards.clear()
        self.env.set_difficulty(self.level)  # a method of each environment
        return super().collect_rollouts(n_steps)


def main(total_timesteps: int = 60_000, rollout_length: int = 64, seed: int = 0):
    env = as_vector_env([Gate() for _ in range(8)])
    policy = ActorCritic(env.observation_space, env.action_space, seed=seed)
    trainer = CurriculumTrainer(policy, env, learning_rate=1e-3, batch_size=128, seed=seed)

    levels = []

    def report(trainer, metrics):
        if not levels or trainer.level != levels[-1]:
            print(f"step {trainer.total_timesteps:>6}: level {trainer.level}")
        levels.append(trainer.level)
        return trainer.level < trainer.hardest

    trainer.train(total_timesteps, rollout_length=rollout_length, callback=report)
    env.close()
    return levels


if __name__ == "__main__":
    main()
