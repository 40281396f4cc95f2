"""Continuous actions of off-policy learners lie within ±1 and reach the bounds of the space exactly."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from palaestra.errors import ConfigError
from palaestra.policy.off_policy.unit_actions import ClippedGaussian, NoisyAction, TanhGaussian

BOX = spaces.Box(np.array([-2.0, 0.1], np.float32), np.array([2.0, 0.7], np.float32))


def test_one_is_the_upper_bound_and_minus_one_the_lower_to_the_last_bit():
    distribution = NoisyAction(BOX)
    unit = np.array([[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]], np.float32)
    action = distribution.to_env(unit)
    assert action[0].tolist() == BOX.high.tolist()
    assert action[1].tolist() == BOX.low.tolist()
    assert action[2] == pytest.approx([0.0, 0.4])
    assert action.dtype == np.float32


def test_actions_of_a_dataset_come_back_and_outliers_are_clipped():
    distribution = NoisyAction(BOX)
    assert distribution.from_env(np.array([[1.0, 0.25], [9.0, 0.0]])).tolist() == [[0.5, -0.5], [1.0, -1.0]]


@settings(deadline=None, max_examples=50)
@given(st.floats(-1e3, 1e3, width=32), st.floats(1e-3, 1e3), st.floats(-1, 1, width=32))
def test_scaling_there_and_back_changes_at_most_the_rounding(low, width, unit):
    high = float(np.float32(low + width))
    distribution = NoisyAction(spaces.Box(np.float32(low), np.float32(high), (1,), np.float32))
    action = distribution.to_env(np.array([[unit]], np.float32))
    assert np.float32(low) <= action[0, 0] <= np.float32(high)
    tolerance = 1e-5 + 1e-6 * max(abs(low), abs(high)) / width
    assert distribution.from_env(action)[0, 0] == pytest.approx(unit, abs=tolerance)


def test_the_density_of_a_squashed_action_agrees_with_that_of_its_sample():
    distribution = TanhGaussian(BOX)
    parameters, noise = torch.tensor([[0.2, -0.4, -1.0, 0.3]]), torch.tensor([[0.5, -0.7]])
    action, log_prob = distribution.sample_with_log_prob(parameters, noise)
    assert distribution.log_prob(parameters, action) == pytest.approx(log_prob, rel=1e-4)
    assert torch.equal(distribution.sample(parameters, noise), action)
    reference = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(parameters[:, :2], parameters[:, 2:].exp()),
        torch.distributions.transforms.TanhTransform(),
    )
    assert reference.log_prob(action).sum(-1) == pytest.approx(log_prob, rel=1e-4)


def test_noise_of_exploration_is_clipped_to_the_unit_interval():
    distribution = NoisyAction(BOX)
    distribution.exploration.fill_(0.5)
    sample = distribution.sample(torch.tensor([[0.9, -0.2]]), torch.tensor([[1.0, 1.0]]))
    assert sample.tolist() == [pytest.approx([1.0, 0.3])]


def test_a_clipped_gaussian_has_the_density_of_the_gaussian():
    distribution = ClippedGaussian(BOX)
    reference = torch.distributions.Normal(torch.tensor([0.3, 0.1]), 1.0)
    action = torch.tensor([[1.0, -1.0]])
    expected = reference.log_prob(action).sum(-1)
    assert distribution.log_prob(torch.tensor([[0.3, 0.1]]), action).detach() == pytest.approx(expected)


def test_bounds_that_are_not_finite_are_refused():
    with pytest.raises(ConfigError, match="bounds of the space, and these are not finite"):
        TanhGaussian(spaces.Box(-np.inf, np.inf, (1,)))
