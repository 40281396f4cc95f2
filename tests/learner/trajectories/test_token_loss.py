"""The objective over tokens: clipping, stale tokens, normalisers, and that cutting it up changes nothing."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palaestra.learner.trajectories.algorithm import token_weights
from palaestra.learner.trajectories.built_in import importance_weights, k3, surrogate

LOG2 = math.log(2.0)


def ones(*shape):
    return torch.ones(*shape)


def test_every_token_counts_alike_or_every_trajectory_does_or_each_token_by_a_constant():
    assert token_weights([2, 6], "tokens") == [1 / 8, 1 / 8]
    assert token_weights([2, 6], "trajectory") == [1 / 4, 1 / 12]
    assert token_weights([2, 6], "constant", constant=10) == [1 / 20, 1 / 20]
    assert token_weights([], "tokens") == []


def test_a_failure_three_times_as_long_outweighs_a_success_only_where_tokens_are_not_diluted():
    # One success of 2 tokens (+1 each), one failure of 6 (-1 each): the whole push of each side.
    diluted, constant = token_weights([2, 6], "trajectory"), token_weights([2, 6], "constant", constant=4)
    assert (2 * diluted[0], 6 * diluted[1]) == (0.5, 0.5)
    assert (2 * constant[0], 6 * constant[1]) == (0.25, 0.75)


def test_the_clip_holds_a_good_token_above_and_a_bad_one_below():
    log_probs, proximal = torch.tensor([[LOG2], [LOG2], [-LOG2], [-LOG2]]) - 3, torch.full((4, 1), -3.0)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    found = surrogate(log_probs, proximal, advantage, ones(4, 1), clip_low=0.25, clip_high=0.5)
    assert found.objective.squeeze(1).tolist() == pytest.approx([1.5, -2.0, 0.5, -0.75])
    assert found.clipped.squeeze(1).tolist() == [True, False, False, True]


def test_clip_higher_lets_a_ratio_of_1_25_push_on_where_the_even_clip_holds_it():
    now = torch.tensor([[math.log(1.25)]], requires_grad=True)
    for clip_high, push in ((0.2, 0.0), (0.28, 1.25)):
        (slope,) = torch.autograd.grad(
            surrogate(now, torch.zeros(1, 1), ones(1), ones(1, 1), clip_low=0.2, clip_high=clip_high).objective.sum(),
            now,
        )
        assert slope.item() == pytest.approx(push)


def test_a_stale_token_counts_by_how_much_likelier_it_is_today_up_to_the_limit():
    behaviour = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    proximal = behaviour + torch.tensor([0.0, LOG2, math.log(8.0), -LOG2])
    stale = torch.tensor([True, True, True, True])
    found = importance_weights(proximal, behaviour, stale, limit=4.0)
    assert found.tolist() == pytest.approx([1.0, 2.0, 4.0, 0.5])


def test_a_fresh_token_counts_exactly_one_whatever_rounding_says():
    found = importance_weights(torch.tensor([-1.0001]), torch.tensor([-1.0]), torch.tensor([False]), limit=2.0)
    assert found.tolist() == [1.0]


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_without_stale_tokens_the_objective_is_plain_ppo_to_the_last_bit(seed):
    generator = torch.Generator().manual_seed(seed)
    behaviour = -torch.rand(3, 4, generator=generator)
    now = behaviour + 0.5 * torch.randn(3, 4, generator=generator)
    advantage = torch.randn(3, generator=generator)
    importance = importance_weights(behaviour, behaviour, torch.zeros(3, 4, dtype=torch.bool), limit=2.0)
    found = surrogate(now, behaviour, advantage, importance, clip_low=0.2, clip_high=0.2)

    ratio = (now - behaviour).exp()
    plain = torch.min(advantage[:, None] * ratio, advantage[:, None] * ratio.clamp(0.8, 1.2))
    assert torch.equal(found.objective, plain)


def test_an_absurd_ratio_stays_finite():
    found = surrogate(torch.zeros(1, 1), torch.full((1, 1), -500.0), -ones(1), ones(1, 1), clip_low=0.2, clip_high=0.2)
    assert torch.isfinite(found.objective).all()


def test_k3_of_half_the_probability_is_half_minus_log_half_minus_one():
    assert k3(torch.tensor([0.0]), torch.tensor([-LOG2])).item() == pytest.approx(0.5 + LOG2 - 1)
    assert k3(torch.tensor([-1.0]), torch.tensor([-1.0])).item() == 0.0
