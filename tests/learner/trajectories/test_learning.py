"""Every algorithm learns the game for real: the probability of the right word goes from 1 in 12 to most of the time."""

import numpy as np
import pytest
from tests.learner.trajectories.toy import NUMBERS, TablePolicy, play, skill, twin

from palaestra.experience.trajectory import Outcome
from palaestra.learner.trajectories import GRPO, RejectionSampling, TrajectoryLearner, TrajectoryPPO, UpdateConfig
from palaestra.learner.trajectories.replay import ReplayConfig
from palaestra.learner.trajectories.reward import RewardConfig

WANTED, AT_MOST = 48, 256
"""Episodes worth learning from per update; and how many are played for them, at most."""


def trained(algorithm, *, updates=15, lag=0, length=1, miss=Outcome.FAILURE, replay=None, reward=None, **settings):
    """The skill after some updates, each on 48 episodes or more that are worth it, by weights `lag` updates old."""
    policy, rng = TablePolicy(), np.random.default_rng(0)
    config = UpdateConfig(**({"learning_rate": 0.2, "microbatch_turns": 64} | settings))
    learner = TrajectoryLearner(policy, algorithm, config, replay=replay, reward=reward)
    actors = [twin(policy)]
    for update in range(updates):
        batch, groups = [], 0
        while len(batch) < WANTED and groups * algorithm.group_size < AT_MOST:
            seed, group = int(rng.integers(NUMBERS)), f"{update}-{groups}"
            batch += learner.admit([
                play(actors[0], rng, seed=seed, name=f"{group}-{member}", group=group, length=length, miss=miss)
                for member in range(algorithm.group_size)
            ])  # fmt: skip
            groups += 1
        metrics = learner.update(batch)
        policy.version = learner.version
        actors = [*actors, twin(policy)][-1 - lag :]
    assert metrics["update"] == updates
    return skill(policy), metrics


def test_before_anything_is_learned_the_right_word_is_one_of_twelve():
    assert skill(TablePolicy()) == pytest.approx(1 / 12, abs=0.03)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (RejectionSampling(), {}),
        (RejectionSampling(), {"replay": ReplayConfig(share=0.25)}),
        (GRPO(group_size=8), {"epochs": 2}),
        (GRPO(group_size=8, normaliser="constant", normaliser_tokens=3, scale="none"), {"epochs": 2}),
        (GRPO(group_size=8), {"epochs": 2, "lag": 2}),
        (TrajectoryPPO(), {"epochs": 2, "length": 2}),
        (TrajectoryPPO(), {"epochs": 2, "lag": 2, "length": 2}),
    ],
)
def test_it_learns_the_game(algorithm, settings):
    learned, metrics = trained(algorithm, **settings)
    assert learned > 0.4
    assert metrics["staleness_max"] >= settings.get("lag", 0)


def test_a_value_that_counts_on_a_future_after_the_step_limit_believes_in_success_that_never_comes():
    # Every miss ends at the step limit. The bootstrapped value hears only of successes.
    how = {"updates": 20, "epochs": 2, "miss": Outcome.TRUNCATED, "reward": RewardConfig(truncated=0.0)}
    ends, told = trained(TrajectoryPPO(), **how)
    goes_on, hoped = trained(TrajectoryPPO(bootstrap_truncated=True), **how)
    assert hoped["value_mean"] - hoped["reward_mean"] > 0.15
    assert abs(told["value_mean"] - told["reward_mean"]) < 0.15
    assert ends > goes_on
