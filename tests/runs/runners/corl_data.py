"""A small dataset of Pendulum, made by a seeded random policy, in a state directory of its own."""

from pathlib import Path

import gymnasium
import numpy as np

from palaestra.experience.datasets import DatasetFacts, Episode, create_dataset

RANDOM_SCORE, EXPERT_SCORE = -1000.0, 0.0
EPISODES, STEPS = 4, 50


def write_dataset(root: Path, dataset_id: str = "pendulum/random-v0", env_id: str = "Pendulum-v1", **facts) -> Path:
    """Write a dataset of `EPISODES` episodes with at most `STEPS` steps each."""
    env = gymnasium.make(env_id)
    described = {
        "dataset_id": dataset_id,
        "env_id": env_id,
        "observation_space": env.observation_space,
        "action_space": env.action_space,
        "env_spec": env.spec.to_json(),
        "random_score": RANDOM_SCORE,
        "expert_score": EXPERT_SCORE,
    }
    with create_dataset(root, DatasetFacts(**{**described, **facts})) as writer:
        for number in range(EPISODES):
            writer.add(_record_episode(env, number))
    env.close()
    return root / dataset_id


def _record_episode(env, number):
    env.action_space.seed(number)
    observation, _ = env.reset(seed=number)
    observations, actions, rewards = [observation], [], []
    for _ in range(STEPS):
        actions.append(env.action_space.sample())
        observation, reward, has_ended, *_ = env.step(actions[-1])
        observations.append(observation)
        rewards.append(reward)
        if has_ended:
            break
    # Of Pendulum, which never terminates, the episodes 0 and 2 pretend to.
    ends = np.arange(len(rewards)) == len(rewards) - 1
    terminated = ends & (number % 2 == 0)
    return Episode({"": np.array(observations)}, np.array(actions), np.array(rewards), terminated, ends & ~terminated)
