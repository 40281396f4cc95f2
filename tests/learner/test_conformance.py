"""Our learners and algorithms keep what the training loop relies on, and so does one that a user writes in 20 lines."""

import re
from pathlib import Path

import pytest

from palaestra.env import as_vector_env
from palaestra.errors import ConfigError
from palaestra.learner import PPO, RolloutAlgorithm, evaluate_actions, flatten_rollout
from palaestra.learner.conformance import check_learner, check_rollout_algorithm
from palaestra.learner.registry import build_algorithm
from palaestra.policy import ActorCritic, PolicyConfig
from palaestra.train import Trainer

COMPILED = pytest.mark.parametrize("compiled", ["auto", "off"])


def _algorithm_of_the_page():
    """The class that docs/algorithms.md shows."""
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    code = re.search(r"```python\n(.*?)```", page.split("## Your own algorithm on rollouts")[1], re.DOTALL).group(1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    scope = {}
    exec(code, scope)
    return scope["ActorCriticLoss"]


Own = _algorithm_of_the_page()


class Silent(Own):
    def loss(self, policy, batch):
        return super().loss(policy, batch).detach().requires_grad_()


class Careless(Own):
    def prepare(self, rollout):
        rollout["reward"] += 1.0
        return super().prepare(rollout)


def _trainer(algorithm, compiled="auto"):
    env = as_vector_env("CartPole-v1", num_envs=2)
    policy = ActorCritic(env.observation_space, env.action_space, PolicyConfig(hidden=(8,)), seed=1)
    return Trainer(policy, env, algorithm, seed=1, compiled=compiled)


def _weights(learner):
    return [parameter.detach().tolist() for parameter in learner.policy.parameters()]


@COMPILED
@pytest.mark.parametrize("algorithm", [PPO, Own])
def test_a_learner_of_rollouts_keeps_its_promises(algorithm, compiled):
    def make():
        return _trainer(algorithm(n_epochs=2, batch_size=16), compiled).training.learner

    experience = _trainer(algorithm()).collect_rollouts(32)
    check_learner(make, experience, _weights)


@pytest.mark.parametrize("algorithm", [PPO(), PPO(correction="none", value_clip=None), Own()])
def test_an_algorithm_on_rollouts_keeps_its_promises(algorithm):
    trainer = _trainer(algorithm)
    check_rollout_algorithm(algorithm, trainer.policy, trainer.collect_rollouts(16).columns())


@pytest.mark.parametrize(("broken", "rule"), [(Silent, "no gradient"), (Careless, "must not change reward")])
def test_an_algorithm_that_breaks_a_rule_is_told_which(broken, rule):
    trainer = _trainer(broken())
    with pytest.raises((AssertionError, RuntimeError), match=rule):
        check_rollout_algorithm(broken(), trainer.policy, trainer.collect_rollouts(16).columns())


def test_an_algorithm_of_ones_own_learns_cartpole_by_its_address():
    algorithm = build_algorithm(
        f"{__name__}:Own", {"learning_rate": 3e-3, "n_epochs": 1, "batch_size": 64}
    )  # fmt: skip
    trainer = _trainer(algorithm)
    history = trainer.train(20_000, rollout_length=128)
    assert history[-1]["episode_return"] > 1.5 * history[0]["episode_return"]


def test_an_algorithm_without_a_loss_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"is not an algorithm on rollouts: it has no loss\(policy, batch\)"):
        build_algorithm(f"{__name__}:Unfinished")


class Unfinished(RolloutAlgorithm):
    def prepare(self, rollout):
        return flatten_rollout(rollout)


class Vector(Own):
    def loss(self, policy, batch):
        return evaluate_actions(policy, batch)[0]


class Detached(Own):
    def loss(self, policy, batch):
        return super().loss(policy, batch).detach()


@pytest.mark.parametrize(("broken", "gave"), [(Vector, r"shape \[16\]"), (Detached, "Tensor")])
def test_a_loss_that_cannot_be_minimised_is_refused_by_name(broken, gave):
    trainer = _trainer(broken(batch_size=16))
    with pytest.raises(
        ConfigError, match=rf"algorithm = '{broken.__name__}': its loss returned {gave}, which cannot be"
    ):
        trainer.learn(trainer.collect_rollouts(16))
