"""What a trainer is given is refused where it would be taken for a default or fail in the middle of training."""

import pytest
from torch import nn

from palaestra.env import EnvConfig, make_env
from palaestra.errors import ConfigError
from palaestra.learner import PPO, RolloutAlgorithm
from palaestra.policy import ActorCritic, PolicyConfig
from palaestra.train import Trainer


@pytest.fixture
def parts():
    env = make_env(EnvConfig(id="CartPole-v1", num_envs=2))
    yield ActorCritic(env.observation_space, env.action_space, PolicyConfig(hidden=(8,)), seed=0), env
    env.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"buffer_type": "ring"}, r"Trainer\.buffer_type = 'ring': is not known\. Use one of standard, vla"),
        ({"compiled": "maybe"}, r"Trainer\.compiled = 'maybe': is not known\. Use one of auto, on, off"),
        ({"buffer_size": 0}, r"Trainer\.buffer_size = 0: must be at least 1"),
        ({"torch_threads": 0}, r"Trainer\.torch_threads = 0: must be at least 1"),
        ({"algorithm": "ppo"}, r"Trainer\.algorithm = 'ppo': is not an algorithm on rollouts"),
        ({"algorithm": PPO}, r"Trainer\.algorithm = 'PPO': is a class\. Give an instance"),
        ({"algorithm": RolloutAlgorithm()}, r"Trainer\.algorithm = 'RolloutAlgorithm': it has no prepare"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(parts, settings, message):
    with pytest.raises(ConfigError, match=message):
        Trainer(*parts, **settings)


@pytest.mark.parametrize("policy", [None, nn.Linear(3, 3)])
def test_what_is_no_policy_is_refused(policy):
    with pytest.raises(ConfigError, match=r"Trainer\.policy = .* is not a policy"):
        Trainer(policy, "CartPole-v1")


def test_an_algorithm_is_checked_when_it_is_replaced(parts):
    trainer = Trainer(*parts)
    with pytest.raises(ConfigError, match="is not an algorithm on rollouts"):
        trainer.algorithm = None
    assert isinstance(trainer.algorithm, PPO)
