"""Evaluation: so many episodes as were asked for, each environment its share, and nothing moves."""

import pytest
import torch

from palaestra.env import as_vector_env
from palaestra.env.toy import Bandit, Countdown, MaskedChoice, MixedSenses
from palaestra.errors import ConfigError
from palaestra.evaluation import evaluate
from palaestra.policy import ActorCritic


def _policy(env, **settings):
    return ActorCritic(env.observation_space, env.action_space, seed=0, **settings)


def test_five_episodes_on_two_environments_are_three_and_two():
    env = as_vector_env([Countdown(3), Countdown(3)])
    found = evaluate(_policy(env), env, episodes=5, seed=0)
    assert found.returns == (6.0,) * 5
    assert found.lengths == (3,) * 5
    assert found.to_json()["episodes"] == 5


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


def test_where_the_environment_tells_successes_are_counted_with_an_interval():
    from palaestra.evaluation import Evaluation
    from palaestra.evaluation.statistics import wilson_interval

    found = Evaluation((1.0,) * 10, (5,) * 10, (True,) * 9 + (False,))
    assert found.success_rate == 0.9
    low, high = found.to_json()["success_ci95"]
    assert (round(low, 3), round(high, 3)) == (0.596, 0.982)  # Wilson, 9 of 10
    assert wilson_interval(0, 10)[0] == 0.0
    assert wilson_interval(10, 10)[1] == pytest.approx(1.0)
    assert "success_rate" not in Evaluation((1.0,), (5,)).to_json()


def test_an_environment_s_own_word_on_success_reaches_evaluation():
    from palaestra.env import EnvConfig, make_env
    from palaestra.policy import ActorCritic, PolicyConfig

    env = make_env(EnvConfig(id="palaestra/TableReach-v0", num_envs=2))
    policy = ActorCritic(env.observation_space, env.action_space, PolicyConfig(hidden=(8,), image_features=8))
    found = evaluate(policy, env, episodes=3, seed=0)
    assert len(found.successes) == 3
    # Solving ends an episode early, and nothing else does.
    assert [length < 25 for length in found.lengths] == list(found.successes)
