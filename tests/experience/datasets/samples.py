"""Small datasets with values that can be checked by hand."""

import numpy as np
from gymnasium import spaces

from palaestra.experience.datasets import DatasetFacts, Episode, create_dataset, find_dataset

BOX = spaces.Box(-10.0, 10.0, (2,), np.float32)
CHOICES = spaces.Discrete(3)


def count_up(length, *, first=0, terminated=True):
    """An episode whose k-th observation is [first + k, -(first + k)] and whose k-th reward is k."""
    numbers = np.arange(first, first + length + 1, dtype=np.float32)
    ends = np.arange(length) == length - 1
    return Episode(
        {"": np.stack([numbers, -numbers], axis=1)},
        np.arange(length) % 3,
        np.arange(length, dtype=np.float32),
        ends & terminated,
        ends & (not terminated),
    )


def make_dataset(root, dataset_id="count/up-v0", episodes=None, **facts):
    """Two episodes of 3 and 2 steps: five steps."""
    wanted = {"env_id": "Count-v0", "observation_space": BOX, "action_space": CHOICES, "about": {"policy": "test"}}
    with create_dataset(root, DatasetFacts(dataset_id=dataset_id, **(wanted | facts))) as writer:
        for episode in episodes or [count_up(3), count_up(2, first=5, terminated=False)]:
            writer.add(episode)
    return find_dataset(dataset_id, root)
