"""An `nn.Module` with `log_probs` and nothing else is a policy."""

import numpy as np
import pytest
import torch
from tests.learner.trajectories.toy import NUMBERS, VOCABULARY, play, skill
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from palaestra.errors import ConfigError, ExperienceError
from palaestra.experience.turn_scoring import TokenLogProbs, turn_inputs
from palaestra.learner.trajectories import GRPO, TrajectoryLearner, TrajectoryPPO, UpdateConfig
from palaestra.learner.trajectories.conformance import check_trajectory_policy


class Bigram(nn.Module):
    """Each token by the one before it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(VOCABULARY, VOCABULARY))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)

    def log_probs(self, turns, *, with_values=False, with_entropy=False, grad=True):
        rows = []
        for each in turns:
            tokens = torch.tensor(each.turn.token_ids.astype(np.int64))
            before = torch.cat([torch.tensor(each.turn.prompt_ids[-1:].astype(np.int64)), tokens[:-1]])
            scores = torch.log_softmax(self.table[before] / each.temperature, -1)
            rows.append(scores.gather(-1, tokens[:, None]).squeeze(-1))
        padded = pad_sequence(rows, batch_first=True)
        mask = pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in rows], batch_first=True)
        return TokenLogProbs(padded if grad else padded.detach(), mask)


class Player(Bigram):
    """The same, with what the game needs to play it."""

    version = 0

    def spoken(self, temperature):
        return torch.log_softmax(self.table.detach() / temperature, -1).numpy()


def played(policy, learner, update, rng):
    return [
        play(policy, rng, seed=start % NUMBERS, name=f"{start}-{member}", group=f"{update}-{start}", length=1,
             version=learner.version)
        for start in range(20)
        for member in range(4)
    ]  # fmt: skip


def learner_of(policy, algorithm, **settings):
    return TrajectoryLearner(policy, algorithm, UpdateConfig(learning_rate=0.2, microbatch_turns=64, **settings))


@pytest.mark.parametrize("settings", [{}, {"epochs": 2, "minibatches": 2}])
def test_it_learns_and_what_is_frozen_stays(settings):
    policy, rng = Player(), np.random.default_rng(0)
    learner = learner_of(policy, GRPO(group_size=4), **settings)
    for update in range(20):
        metrics = learner.update(played(policy, learner, update, rng))
    assert skill(policy) > 0.4
    assert metrics["unchecked_share"] == 0.0
    assert "entropy" not in metrics
    assert not policy.frozen.any()
    assert list(learner.weights()) == ["table"]
    assert learner.weights()["table"] is policy.table


def test_it_is_held_against_what_learning_needs_of_it():
    policy = Player()
    turns = turn_inputs(play(policy, np.random.default_rng(4), length=6))
    check_trajectory_policy(policy, turns, with_values=False, with_entropy=False)


def test_what_it_lacks_is_asked_for_by_name():
    policy, rng = Player(), np.random.default_rng(0)
    for algorithm, error, message in (
        (TrajectoryPPO(), ExperienceError, "needs a value head"),
        (GRPO(group_size=4, kl_coef=0.1), ConfigError, "no weights from before training"),
        (GRPO(group_size=4, entropy_coef=0.1), ExperienceError, "returned no entropy"),
    ):
        learner = learner_of(policy, algorithm)
        with pytest.raises(error, match=message):
            learner.update(played(policy, learner, 0, rng))
        assert learner.version == 0
