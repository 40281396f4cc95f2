"""The algorithm of one's own on the page about algorithms has twenty lines, keeps the rules, and learns."""

import re
from pathlib import Path

import numpy as np
import pytest
from tests.learner.trajectories.toy import NUMBERS, TablePolicy, play, skill

from palaestra.learner.trajectories import TrajectoryLearner, UpdateConfig
from palaestra.learner.trajectories.conformance import check_trajectory_algorithm

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"


@pytest.fixture
def own():
    """The class that the page shows."""
    section = PAGE.read_text().split("## Your own algorithm on trajectories")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    scope = {}
    exec(code, scope)
    return scope["LeaveOneOut"]


def test_it_keeps_the_rules(own):
    check_trajectory_algorithm(own)


def test_it_learns_the_game(own):
    policy, rng = TablePolicy(), np.random.default_rng(0)
    learner = TrajectoryLearner(policy, own(), UpdateConfig(learning_rate=0.2, microbatch_turns=64))
    before = skill(policy)
    for update in range(20):
        batch = [
            play(policy, rng, seed=seed % NUMBERS, name=f"{seed}-{member}", group=f"{update}-{seed}", length=1,
                 version=learner.version)
            for seed in range(24)
            for member in range(own.group_size)
        ]  # fmt: skip
        learner.update(batch)
    assert learner.version == 20
    assert before < 0.12
    assert skill(policy) > 0.4
