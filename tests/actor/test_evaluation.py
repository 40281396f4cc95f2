"""Evaluation: so many episodes as were asked for, each environment its share, and nothing moves."""

import pytest
import torch

from palaestra.actor import evaluate
from palaestra.env import as_vector_env
from palaestra.env.toy import Bandit, Countdown, MaskedChoice, MixedSenses
from palaestra.errors import ConfigError
from palaestra.policy import ActorCritic


def _policy(env, **settings):
    return ActorCritic(env.observation_space, env.action_space, seed=0, **settings)


def test_five_episodes_on_two_environments_are_three_and_two():
    env = as_vector_env([Countdown(3), Countdown(3)])
    found = evaluate(_policy(env), env, episodes=5, seed=0)
    assert found.returns == (6.0,) * 5
    assert found.lengths == (3,) * 5
    assert found.report()["episodes"] == 5


def test_the_most_likely_action_is_taken_every_time():
    env = as_vector_env([Bandit(3, best=1)])
    policy = _policy(env)
    with torch.no_grad():
        policy.actor[-1].bias.copy_(torch.tensor([0.0, 0.5, 0.0]))  # drawn, arm 1 would come less than half the time
    assert evaluate(policy, env, episodes=20, seed=0).mean_return == 1.0
    assert evaluate(policy, env, episodes=200, seed=0, deterministic=False).mean_return < 0.7


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_same_seed_gives_the_same_episodes(deterministic):
    env = as_vector_env("CartPole-v1")
    policy = _policy(env)
    one, again = (evaluate(policy, env, episodes=8, seed=5, deterministic=deterministic) for _ in range(2))
    assert one == again
    assert one != evaluate(policy, env, episodes=8, seed=6, deterministic=deterministic)


def test_nothing_of_the_policy_moves():
    env = as_vector_env([MixedSenses(), MixedSenses()])
    policy = _policy(env, normalize_observation=True)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    evaluate(policy, env, episodes=3, seed=0)
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


def test_masks_are_respected():
    env = as_vector_env([MaskedChoice()])  # raises on a forbidden action
    assert len(evaluate(_policy(env), env, episodes=5, seed=0, deterministic=False).returns) == 5


def test_no_episodes_are_refused():
    env = as_vector_env([Countdown()])
    with pytest.raises(ConfigError, match="at least 1"):
        evaluate(_policy(env), env, episodes=0, seed=0)
