"""The algorithm that docs/algorithms.md shows is complete: it learns, and it is found by its address."""

import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from gymnasium import spaces

from palaestra.errors import ConfigError
from palaestra.learner.conformance import check_learner
from palaestra.learner.transitions import TransitionAlgorithm, TransitionLearner
from palaestra.learner.transitions.conformance import check_transition_algorithm
from palaestra.policy.config import PolicyConfig
from palaestra.policy.off_policy import QNetwork
from palaestra.train import config_from, train

from .linear import random_batch

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"


@pytest.fixture
def conservative(monkeypatch):
    section = PAGE.read_text().split("## Your own algorithm on transitions")[1]
    module = ModuleType("algorithm_of_the_page")
    exec(re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.Conservative


def _policy():
    config = PolicyConfig(name="q_network", hidden=(8,), activation="relu")
    return QNetwork(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2), config, seed=1)


def test_it_keeps_the_promises_of_an_algorithm_and_of_a_learner(conservative):
    check_transition_algorithm(conservative(), _policy(), random_batch(_policy()))
    check_learner(
        lambda: TransitionLearner(_policy(), conservative(learning_rate=1e-2)),
        random_batch(_policy()),
        lambda learner: learner.flat.vector.tolist(),
    )


def test_it_trains_by_its_address(conservative, tmp_path):
    config = config_from(
        {
            "env": {"id": "CartPole-v1"},
            "policy": {"hidden": [8]},
            "algorithm": {"name": "algorithm_of_the_page:Conservative", "pessimism": 0.5, "learning_starts": 10},
            "trainer": {"device": "cpu", "total_timesteps": 30},
            "telemetry": {"progress": False},
        }
    )
    assert config.algorithm["pessimism"] == 0.5
    assert train(config, root=tmp_path, run_id="own").steps == 30


class Unfinished(TransitionAlgorithm):
    pass


def test_a_class_without_losses_is_refused():
    with pytest.raises(ConfigError, match=r"it has no losses\(policy, target, batch, step\)"):
        config_from({"env": {"id": "CartPole-v1"}, "algorithm": {"name": f"{__name__}:Unfinished"}})
