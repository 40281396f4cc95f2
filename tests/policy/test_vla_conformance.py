"""The kit that model authors run: the reference passes, and each broken rule is told with what to change."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from palaestra.errors import ConfigError
from palaestra.policy.vla.conformance import check_vla_model, random_observations
from palaestra.policy.vla.models import LinearVLA

OBSERVATION = spaces.Dict(
    {
        "rgb": spaces.Box(0, 255, (4, 4, 3), np.uint8),
        "proprio": spaces.Box(-np.inf, np.inf, (5,), np.float32),
        "language": spaces.MultiDiscrete([30] * 6),
    }
)


def _check(cls, shape=(7,)):
    torch.manual_seed(0)
    chunk = shape[0] if len(shape) == 2 else 1
    model = cls(OBSERVATION, 7, chunk)
    check_vla_model(model, OBSERVATION, spaces.Box(-1, 1, shape, np.float32))


@pytest.mark.parametrize("shape", [(7,), (4, 7)])
def test_the_linear_reference_keeps_every_rule(shape):
    _check(LinearVLA, shape)


def test_an_action_may_be_given_as_its_number_of_numbers():
    check_vla_model(LinearVLA(OBSERVATION, 3), OBSERVATION, 3)
    check_vla_model(LinearVLA(OBSERVATION, 3, chunk=5), OBSERVATION, 3, chunk=5)


def test_the_check_leaves_the_model_and_torchs_generator_as_it_found_them():
    model = LinearVLA(OBSERVATION, 7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    check_vla_model(model.train(), OBSERVATION, 7)
    assert torch.equal(torch.rand(2), expected)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_observations_for_a_trial_are_as_rollouts_store_them():
    drawn = random_observations(spaces.Dict({"arm": OBSERVATION, "huge": spaces.Box(-3e38, 3e38, (2,), np.float64)}), 3)
    kinds = {name: (tuple(part.shape), part.dtype) for name, part in drawn.items()}
    assert kinds == {
        "arm/rgb": ((3, 4, 4, 3), torch.uint8),
        "arm/proprio": ((3, 5), torch.float32),
        "arm/language": ((3, 6), torch.int64),
        "huge": ((3, 2), torch.float32),
    }
    assert drawn["huge"].abs().max() <= 10
    assert drawn["arm/rgb"].float().std() > 50


class NoValue(LinearVLA):
    get_value = None


class NoForward(LinearVLA):
    forward = nn.Module.forward


class NoParameters(nn.Module):
    def __init__(self, *_):
        super().__init__()


class FrozenByItself(LinearVLA):
    def __init__(self, *given):
        super().__init__(*given)
        self.requires_grad_(False)


class TooWide(LinearVLA):
    def forward(self, observations):
        return torch.cat([super().forward(observations)] * 2, -1)


class Chunks(LinearVLA):
    def forward(self, observations):
        return super().forward(observations).unsqueeze(1).repeat(1, 8, 1)


class SaysNumpy(LinearVLA):
    def forward(self, observations):
        return super().forward(observations).detach().numpy()


class Whole(LinearVLA):
    def forward(self, observations):
        return super().forward(observations).round().long()


class NotFinite(LinearVLA):
    def forward(self, observations):
        return super().forward(observations) / 0


class FlatValue(LinearVLA):
    def get_value(self, observations):
        return super().get_value(observations).squeeze(-1)


class PerNumber(LinearVLA):
    def evaluate_actions(self, observations, actions):
        log_prob, entropy = super().evaluate_actions(observations, actions)
        return log_prob.unsqueeze(-1).expand(-1, 7), entropy


class OnlyLogProb(LinearVLA):
    def evaluate_actions(self, observations, actions):
        return super().evaluate_actions(observations, actions)[0]


class Detached(LinearVLA):
    def evaluate_actions(self, observations, actions):
        log_prob, entropy = super().evaluate_actions(observations, actions)
        return log_prob.detach(), entropy


class ValueWithoutGradient(LinearVLA):
    @torch.no_grad()
    def get_value(self, observations):
        return super().get_value(observations)


class DropoutAlwaysOn(LinearVLA):
    def _features(self, observations):
        return nn.functional.dropout(super()._features(observations), 0.5)


class DropoutInEvaluation(LinearVLA):
    def evaluate_actions(self, observations, actions):
        log_prob, entropy = super().evaluate_actions(observations, actions)
        return nn.functional.dropout(log_prob, 0.5), entropy


class NeverVaries(LinearVLA):
    def forward(self, observations):
        return super().forward(observations, deterministic=True)


class OwnRandomness(LinearVLA):
    def __init__(self, *given):
        super().__init__(*given)
        self.own = torch.Generator().manual_seed(0)

    def forward(self, observations, *, generator=None):
        return super().forward(observations, generator=self.own)


class DeterministicIsNot(LinearVLA):
    def forward(self, observations, *, deterministic=False, generator=None):
        mean = super().forward(observations, deterministic=True)
        return mean + torch.rand(mean.shape, generator=generator) * (0.5 if deterministic else 1.0)


class MixesRows(LinearVLA):
    def _features(self, observations):
        features = super()._features(observations)
        return features - features.mean(0, keepdim=True)


class Scribbles(LinearVLA):
    def _features(self, observations):
        observations["proprio"] *= 2
        return super()._features(observations)


class AddsKeys(LinearVLA):
    def get_value(self, observations):
        value = super().get_value(observations)
        observations["seen"] = value
        return value


class Negated(LinearVLA):
    def evaluate_actions(self, observations, actions):
        log_prob, entropy = super().evaluate_actions(observations, actions)
        return -log_prob, entropy


class IgnoresActions(LinearVLA):
    def evaluate_actions(self, observations, actions):
        return super().evaluate_actions(observations, actions * 0)


class AsksForAnotherKey(LinearVLA):
    def get_value(self, observations):
        return super().get_value(observations) + observations["tactile"]


class WrongShortcut(LinearVLA):
    def evaluate(self, observations, actions):
        log_prob, entropy = self.evaluate_actions(observations, actions)
        return log_prob, entropy, self.get_value(observations) + 1


class WrongActing(LinearVLA):
    def act(self, observations, *, generator=None):
        actions = self.forward(observations, generator=generator)
        return actions, self.evaluate_actions(observations, actions)[0] * 0.5, self.get_value(observations)


BROKEN = {
    NoValue: r"has no method get_value. Add get_value\(observations\) -> values \[B, 1\]",
    NoForward: r"has no method forward. Add forward\(observations\) -> actions \[B, action_dim\]",
    NoParameters: "has no parameters",
    FrozenByItself: "none of its parameters requires a gradient",
    TooWide: r"forward returned has shape \(3, 14\) .* \(3, 7\) is needed.*has 7 numbers, the model's has 14",
    Chunks: r"forward returned has shape \(3, 8, 7\).*set env.action_chunk=8",
    SaysNumpy: "forward returned is a ndarray, not a tensor",
    Whole: "forward returned is int64. Return floating-point",
    NotFinite: "forward returned is not finite. Check the weights",
    FlatValue: r"get_value returned has shape \(3,\) .* \(3, 1\) is needed. Return \[B, 1\]",
    PerNumber: r"log_prob of evaluate_actions has shape \(3, 7\).*\(3,\) is needed. Return \[B\], summed over",
    OnlyLogProb: r"evaluate_actions returned a Tensor. Return \(log_prob, entropy\)",
    Detached: "no gradient of the log_prob of evaluate_actions reaches a trainable parameter.*without torch.no_grad",
    ValueWithoutGradient: "no gradient of what get_value returned reaches",
    DropoutAlwaysOn: "differs between two calls with the same input. Switch dropout off",
    DropoutInEvaluation: "log_prob of evaluate_actions differs between two calls",
    NeverVaries: "same actions for different random numbers. Draw a sample",
    OwnRandomness: "other actions for the same random numbers. Draw from the generator it is handed",
    DeterministicIsNot: r"forward\(deterministic=True\) depends on random numbers. Return the mean",
    MixesRows: "log_prob of the first of 3 rows differs from that of the same row alone. Normalise within a row",
    Scribbles: r"forward changed its input \(proprio\). Work on copies",
    AddsKeys: r"get_value changed its input \(the set of keys\)",
    Negated: "log_prob of evaluate_actions is higher next to the samples of forward than at.*is the sign right",
    IgnoresActions: "log_prob of evaluate_actions does not depend on the actions",
    AsksForAnotherKey: r"its get_value failed on 3 observations \(KeyError: .*tactile.*It was given .*proprio \(3, 5\)",
    WrongShortcut: "the value of evaluate is not that of evaluate_actions and get_value.*leave evaluate out",
    WrongActing: "the log_prob of act is not that of evaluate_actions",
}  # fmt: skip


@pytest.mark.parametrize("cls", BROKEN, ids=lambda cls: cls.__name__)
def test_a_broken_rule_is_told_in_one_line_with_the_remedy(cls):
    with pytest.raises(ConfigError, match=BROKEN[cls]) as caught:
        _check(cls)
    assert str(caught.value).startswith(f"policy.vla_config.model_class = '{cls.__name__}': ")
    assert "\n" not in str(caught.value)


class ShorterChunks(LinearVLA):
    def forward(self, observations):
        return super().forward(observations)[:, :3]


class LooksAhead(LinearVLA):
    def evaluate_actions(self, observations, actions):
        log_prob, entropy = super().evaluate_actions(observations, actions)
        return log_prob - actions[:, -1:].square().sum(-1), entropy


class WholeChunk(LinearVLA):
    def evaluate_actions(self, observations, actions):
        return tuple(number.sum(-1) for number in super().evaluate_actions(observations, actions))


CHUNKED = {
    ShorterChunks: r"has shape \(3, 3, 7\) .* environment executes chunks of 4: set env.action_chunk=3",
    LooksAhead: "log_prob of an action depends on a later one of its chunk",
    WholeChunk: r"log_prob of evaluate_actions has shape \(3,\).*\(3, 4\) is needed. Return \[B, chunk\], one",
}


@pytest.mark.parametrize("cls", CHUNKED, ids=lambda cls: cls.__name__)
def test_a_rule_of_chunks_is_told_as_well(cls):
    with pytest.raises(ConfigError, match=CHUNKED[cls]):
        _check(cls, (4, 7))
