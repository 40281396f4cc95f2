"""Every algorithm on transitions keeps what the training loop relies on; broken ones are found out."""

import numpy as np
import pytest
from gymnasium import spaces

from palaestra.learner.conformance import check_learner
from palaestra.learner.registry import ALGORITHMS
from palaestra.learner.transitions import BC, IQL, SAC, TD3BC, StepLoss, TransitionLearner
from palaestra.learner.transitions.conformance import check_transition_algorithm
from palaestra.policy.config import PolicyConfig
from palaestra.policy.off_policy import TRANSITION_POLICIES

from .linear import random_batch

SEEN = spaces.Box(-1, 1, (3,), np.float32)
CONTINUOUS, DISCRETE = spaces.Box(-2, 2, (2,), np.float32), spaces.Discrete(3)
CASES = [
    ("dqn", DISCRETE),
    ("sac", CONTINUOUS),
    ("td3_bc", CONTINUOUS),
    ("iql", CONTINUOUS),
    ("iql", DISCRETE),
    ("bc", CONTINUOUS),
    ("bc", DISCRETE),
]
EACH = pytest.mark.parametrize(("name", "actions"), CASES)


def _policy(cls, actions):
    config = PolicyConfig(name=cls.policy, hidden=(8, 8), activation="relu")
    return TRANSITION_POLICIES[cls.policy](SEEN, actions, config, seed=1)


def _weights(learner):
    return [parameter.detach().tolist() for parameter in learner.policy.parameters()]


@EACH
@pytest.mark.parametrize("compiled", [True, False])
def test_a_learner_keeps_its_promises(name, actions, compiled):
    cls = ALGORITHMS["transitions"][name]

    def make():
        return TransitionLearner(_policy(cls, actions), cls(learning_rate=1e-2), seed=2, compiled=compiled)

    check_learner(make, random_batch(_policy(cls, actions)), _weights)


@EACH
def test_an_algorithm_keeps_its_promises(name, actions):
    cls = ALGORITHMS["transitions"][name]
    check_transition_algorithm(cls(), _policy(cls, actions), random_batch(_policy(cls, actions)))


class Misnamed(BC):
    def losses(self, policy, target, batch, step):
        for one in super().losses(policy, target, batch, step):
            yield StepLoss("brain", one.loss)


class Careless(BC):
    def losses(self, policy, target, batch, step):
        batch["reward"] += 1.0
        yield from super().losses(policy, target, batch, step)


class Unfinished(SAC):
    losses = SAC.__mro__[1].losses


class Detached(IQL):
    def losses(self, policy, target, batch, step):
        for one in super().losses(policy, target, batch, step):
            yield StepLoss(one.group, one.loss.detach().requires_grad_())


class Astray(TD3BC):
    target_groups = ("actor", "critics")


@pytest.mark.parametrize(
    ("cls", "rule"),
    [
        (Misnamed, "a loss trains 'brain'"),
        (Careless, "must not change reward"),
        (Unfinished, "it has no losses"),
        (Detached, "no gradient reaches value_network"),
        (Astray, "target_groups must be parts of the policy"),
    ],
)
def test_a_broken_algorithm_is_found_out(cls, rule):
    with pytest.raises(AssertionError, match=rule):
        check_transition_algorithm(cls(), _policy(cls, CONTINUOUS), random_batch(_policy(cls, CONTINUOUS)))
