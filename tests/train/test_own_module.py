"""An `nn.Module` that answers `sample` and `log_probs` trains on screens like any model."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.train.test_screen_loop import config, gateway
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from palaestra.errors import CheckpointError, ConfigError, ExperienceError
from palaestra.experience.turn_scoring import TokenLogProbs, TurnInput
from palaestra.policy.vlm.generation import SampleRequest
from palaestra.policy.vlm.module_policy import ModulePolicy
from palaestra.policy.vlm.prompt import Prompt
from palaestra.train.screens import SamplerPublisher, train_screens
from palaestra.transport.conformance import check_publisher

__all__ = ["gateway"]

PLACES = [(x, y) for y in (20, 60, 100) for x in (20, 60, 100, 140)]


class Clicker(nn.Module):
    """Knows twelve places to click, and how likely each is; one token is one click."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(len(PLACES)))

    def text_of(self, token_ids):
        x, y = PLACES[int(token_ids[0])]
        call = {"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [x, y]}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    def sample(self, requests, *, temperature):
        spoken = torch.log_softmax(self.scores / temperature, -1).numpy()
        drawn = [np.random.default_rng(one.seed).choice(len(PLACES), p=np.exp(spoken)) for one in requests]
        return [([token], [spoken[token]]) for token in drawn]

    def log_probs(self, turns, *, with_values=False, with_entropy=False, grad=True):
        rows = []
        for each in turns:
            spoken = torch.log_softmax(self.scores / each.temperature, -1)
            rows.append(spoken[torch.tensor(each.turn.token_ids.astype(np.int64))])
        padded = pad_sequence(rows, batch_first=True)
        return TokenLogProbs(padded, torch.ones_like(padded, dtype=torch.bool))


def test_a_module_of_ones_own_plays_learns_and_resumes(gateway, tmp_path):
    def settings(updates):
        return config(
            gateway,
            updates,
            algorithm={"name": "rejection_sampling", "reward_threshold": -2.0},
            reward={"assumed_range": [-2, 2]},
            trainer={"learning_rate": 0.5},
        )

    module = Clicker()
    first = train_screens(settings(2), policy=module, root=tmp_path, run_id="one")
    assert first.final["trajectories_learned"] == 4
    assert first.final["disagreement_max"] < 1e-5
    assert first.final["unreadable_share"] == 0.0
    learned = module.scores.detach().clone()
    assert not torch.equal(learned, torch.zeros(len(PLACES)))

    resumed = Clicker()
    train_screens(settings(2), policy=resumed, root=tmp_path, run_id="-", warm_start=first.checkpoint)
    again = ModulePolicy(Clicker())
    again.load(first.checkpoint / "policy")
    assert torch.equal(again.module.scores, learned)
    assert again.version == 2
    with pytest.raises(
        CheckpointError, match=r"holds a module of your own \(Clicker\). Continue in Python: train_screens"
    ):
        train_screens(settings(3), root=tmp_path, run_id="-", resume=first.run)


def test_a_module_without_log_probs_is_refused_before_a_run_exists(gateway, tmp_path):
    with pytest.raises(ConfigError, match=r"policy = 'Linear': it has no method sample and log_probs"):
        train_screens(config(gateway), policy=nn.Linear(2, 2), root=tmp_path, run_id="no")
    assert list(tmp_path.iterdir()) == []


def test_a_publisher_of_samplers_keeps_its_promises():
    policy = ModulePolicy(Clicker())
    request = SampleRequest(Prompt(np.array([1], np.int32), ()), seed=0)

    def change():
        with torch.no_grad():
            policy.module.scores += torch.arange(len(PLACES))

    def read():
        (sampled,) = policy.sample([request])
        return int(sampled.versions[0]), sampled.fingerprint

    publisher = SamplerPublisher(policy, None)
    check_publisher(publisher, lambda: dict(policy.named_parameters()), change, read)


class _Answers(Clicker):
    """A clicker whose answers are changed on the way."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def sample(self, requests, *, temperature):
        return self.change(super().sample(requests, temperature=temperature))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda drawn: drawn[:-1], r"_Answers\.sample gave 0 replies to 1 requests"),
        (lambda drawn: None, r"_Answers\.sample gave a NoneType to 1 requests"),
        (lambda drawn: [(tokens, [*spoken, 0.0]) for tokens, spoken in drawn], r"gave \[1, 2\] numbers to request 0"),
    ],
)
def test_replies_of_a_wrong_length_are_refused_with_the_method_that_gave_them(change, message):
    request = SampleRequest(Prompt(np.array([1], np.int32), ()), seed=0)
    with pytest.raises(ExperienceError, match=message):
        ModulePolicy(_Answers(change)).sample([request])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (torch.zeros(1, 1), "gave a Tensor. Return a TokenLogProbs"),
        (TokenLogProbs(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)), r"shape \[1, 2\], expected \[1, 1\]"),
    ],
)
def test_log_probs_of_a_wrong_shape_are_refused(answer, message):
    module = Clicker()
    module.log_probs = lambda turns, **wanted: answer
    turn = TurnInput(SimpleNamespace(token_ids=np.array([3], np.int32)), {})
    with pytest.raises(ExperienceError, match=message):
        ModulePolicy(module).log_probs([turn])


class _Partly(Clicker):
    """Has a frozen weight, a buffer, and two names for one weight."""

    def __init__(self, number=0.0):
        super().__init__()
        self.frozen = nn.Parameter(torch.full((1,), number), requires_grad=False)
        self.register_buffer("statistics", torch.full((1,), number))
        self.tied = self.scores


def test_what_does_not_learn_acts_as_it_was_saved(tmp_path):
    ModulePolicy(_Partly(1.0)).save(tmp_path / "policy")
    policy = ModulePolicy(_Partly(5.0))
    policy.load(tmp_path / "policy")
    acting = policy._acting
    assert (float(acting.frozen), float(acting.statistics)) == (1.0, 1.0)
    policy.module.statistics += 1
    policy.publish(1)
    assert float(acting.statistics) == 2.0


def test_another_module_is_told_what_is_missing(tmp_path):
    ModulePolicy(Clicker()).save(tmp_path / "policy")
    with pytest.raises(CheckpointError, match=r"does not fit this _Partly \(.*Missing key.*frozen"):
        ModulePolicy(_Partly()).load(tmp_path / "policy")


def test_what_is_no_policy_is_refused_before_a_run_exists(gateway, tmp_path):
    with pytest.raises(ConfigError, match=r"policy = 'str': it has no method sample and log_probs"):
        train_screens(config(gateway), policy="tiny", root=tmp_path, run_id="no")
    assert list(tmp_path.iterdir()) == []
