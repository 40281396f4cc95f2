"""Every action distribution against torch.distributions, against counting, and against its own noise."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import distributions as reference

from palaestra.errors import ConfigError
from palaestra.policy.actor_critic import distribution_for
from palaestra.policy.distribution import Bernoulli, Categorical, Gaussian, MultiCategorical, SquashedGaussian

LOW, HIGH = np.array([-1.0, 0.0], np.float32), np.array([3.0, 0.5], np.float32)
BOX = spaces.Box(LOW, HIGH, dtype=np.float32)
KINDS = {
    "discrete": (spaces.Discrete(4), "auto"),
    "several": (spaces.MultiDiscrete([2, 3]), "auto"),
    "switches": (spaces.MultiBinary(3), "auto"),
    "gaussian": (BOX, "gaussian"),
    "squashed": (BOX, "squashed_gaussian"),
}


def _made(kind, log_std=-0.4):
    space, name = KINDS[kind]
    return distribution_for(space, name, log_std)


def _noise(distribution, size, seed=0):
    g = torch.Generator().manual_seed(seed)
    shape = (size, distribution.noise_size)
    return torch.rand(shape, generator=g) if distribution.noise_kind == "uniform" else torch.randn(shape, generator=g)


def _parameters(distribution, size=1, seed=1):
    return torch.randn(size, distribution.num_parameters, generator=torch.Generator().manual_seed(seed))


def _reference(distribution, parameters):
    """The same distribution over one sample's stored action, built from torch.distributions."""
    if isinstance(distribution, Categorical):
        return reference.Categorical(logits=parameters)
    if isinstance(distribution, Bernoulli):
        return reference.Independent(reference.Bernoulli(logits=parameters), 1)
    normal = reference.Normal(parameters, distribution.log_std.exp().expand_as(parameters))
    if type(distribution) is Gaussian:
        return reference.Independent(normal, 1)
    low, high = torch.from_numpy(LOW), torch.from_numpy(HIGH)
    onto = [reference.TanhTransform(cache_size=1), reference.AffineTransform((low + high) / 2, (high - low) / 2)]
    return reference.Independent(reference.TransformedDistribution(normal, onto), 1)


@pytest.mark.parametrize("kind", ["discrete", "switches", "gaussian"])
def test_log_probability_and_entropy_equal_those_of_torch(kind):
    ours = _made(kind)
    parameters = _parameters(ours, 50)
    action = ours.sample(parameters, _noise(ours, 50))
    theirs = _reference(ours, parameters)
    asked = action.float() if kind == "switches" else action
    assert torch.allclose(ours.log_prob(parameters, action), theirs.log_prob(asked), atol=1e-5)
    assert torch.allclose(ours.entropy(parameters), theirs.entropy(), atol=1e-5)


def test_several_choices_have_the_summed_log_probability_and_entropy_of_each():
    ours = _made("several")
    parameters = _parameters(ours, 50)
    action = ours.sample(parameters, _noise(ours, 50))
    first, second = (reference.Categorical(logits=part) for part in parameters.split([2, 3], -1))
    expected = first.log_prob(action[:, 0]) + second.log_prob(action[:, 1])
    assert torch.allclose(ours.log_prob(parameters, action), expected, atol=1e-5)
    assert torch.allclose(ours.entropy(parameters), first.entropy() + second.entropy(), atol=1e-5)


def test_a_squashed_action_has_the_density_of_the_transformed_distribution():
    ours = _made("squashed")
    parameters = _parameters(ours, 50)
    stored = ours.sample(parameters, _noise(ours, 50))
    bent = torch.from_numpy(ours.to_env(stored.detach().numpy()))
    expected = _reference(ours, parameters).log_prob(bent)  # their inverse of tanh costs them a few digits
    assert torch.allclose(ours.log_prob(parameters, stored), expected, atol=2e-3)


def test_the_squashed_density_stays_finite_far_outside_where_tanh_is_1():
    ours = _made("squashed")
    stored = torch.tensor([[40.0, -40.0]])
    assert torch.isfinite(ours.log_prob(torch.zeros(1, 2), stored)).all()
    assert ours.to_env(stored.numpy()).tolist() == [[3.0, 0.0]]


@pytest.mark.parametrize("log_std", [-1.5, -0.4, 0.3])
def test_the_squashed_entropy_equals_a_monte_carlo_estimate(log_std):
    ours = _made("squashed", log_std)
    one = _parameters(ours)
    many = one.expand(200_000, -1)
    with torch.no_grad():
        estimate = -ours.log_prob(many, ours.sample(many, _noise(ours, 200_000))).mean()
        assert ours.entropy(one).item() == pytest.approx(estimate.item(), abs=0.02)


def test_the_squashed_entropy_has_a_gradient_that_widens_the_policy():
    ours = _made("squashed", -1.0)
    ours.entropy(torch.zeros(1, 2)).sum().backward()
    assert (ours.log_std.grad > 0).all()


@pytest.mark.parametrize("kind", ["discrete", "several", "switches"])
def test_what_is_drawn_comes_as_often_as_its_probability_says(kind):
    ours = _made(kind)
    one = _parameters(ours)
    size = 40_000
    drawn = ours.sample(one.expand(size, -1), _noise(ours, size)).view(size, -1)
    for row in torch.unique(drawn, dim=0):
        frequency = (drawn == row).all(-1).double().mean().item()
        probability = ours.log_prob(one, row.view(1, *ours.action_shape)).exp().item()
        # Four standard deviations of a frequency out of 40,000.
        assert abs(frequency - probability) < 4 * math.sqrt(probability * (1 - probability) / size) + 1e-9


@pytest.mark.parametrize("kind", ["gaussian", "squashed"])
def test_normal_actions_have_the_mean_and_deviation_they_were_given(kind):
    ours = _made(kind)
    one = _parameters(ours)
    drawn = ours.sample(one.expand(100_000, -1), _noise(ours, 100_000)).detach()
    assert torch.allclose(drawn.mean(0), one[0], atol=0.01)
    assert torch.allclose(drawn.std(0), torch.full((2,), math.exp(-0.4)), atol=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_noise_draws_the_same_action(kind):
    ours = _made(kind)
    parameters = _parameters(ours, 20)
    first, again = (ours.sample(parameters, _noise(ours, 20)) for _ in range(2))
    other = ours.sample(parameters, _noise(ours, 20, seed=7))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("kind", KINDS)
def test_no_action_is_likelier_than_the_mode(kind):
    ours = _made(kind)
    parameters = _parameters(ours, 1)
    many = parameters.expand(500, -1)
    drawn = ours.sample(many, _noise(ours, 500))
    if kind == "squashed":  # the mode of the Gaussian before it is bent
        best, others = Gaussian.log_prob(ours, parameters, ours.mode(parameters)), Gaussian.log_prob(ours, many, drawn)
    else:
        best, others = ours.log_prob(parameters, ours.mode(parameters)), ours.log_prob(many, drawn)
    assert (others <= best + 1e-6).all()


def test_a_forbidden_action_has_probability_0_and_the_others_share_the_rest():
    ours = Categorical(3)
    masked = ours.apply_mask(torch.tensor([[1.0, 1.0, 5.0]]), torch.tensor([[True, True, False]]))
    assert masked.softmax(-1).tolist() == [[0.5, 0.5, 0.0]]
    assert ours.entropy(masked).item() == pytest.approx(math.log(2))  # and not NaN from 0 log 0
    assert ours.mode(masked).item() != 2


def test_masks_of_several_choices_are_laid_side_by_side():
    ours = MultiCategorical((2, 3))
    mask = torch.tensor([[False, True, True, False, False]])
    masked = ours.apply_mask(_parameters(ours, 1), mask).expand(300, -1)
    drawn = ours.sample(masked, _noise(ours, 300))
    assert set(map(tuple, drawn.tolist())) == {(1, 0)}
    assert ours.log_prob(masked, drawn).abs().max() == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_not_even_the_largest_noise_draws_a_forbidden_action(seed):
    # Rounding may leave the cumulative probabilities just short of the largest float32 below 1.
    ours = Categorical(50)
    parameters = 3 * torch.randn(2000, 50, generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(2000, 50, dtype=torch.bool)
    mask[:, 40:] = False
    noise = torch.full((2000, 1), 1.0 - 2.0**-24)
    drawn = ours.sample(ours.apply_mask(parameters, mask), noise)
    assert mask.gather(1, drawn.unsqueeze(1)).all()


def test_a_mask_over_a_continuum_is_refused():
    with pytest.raises(ConfigError, match="continuous actions cannot be masked"):
        _made("gaussian").apply_mask(torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))


def test_the_environment_receives_actions_in_its_own_numbers():
    discrete = distribution_for(spaces.Discrete(3, start=5))
    assert discrete.to_env(np.array([0, 2])).tolist() == [5, 7]
    several = distribution_for(spaces.MultiDiscrete([2, 3], start=[1, 10]))
    assert several.to_env(np.array([[0, 2]])).tolist() == [[1, 12]]
    table = distribution_for(spaces.MultiDiscrete([[2, 3], [4, 5]]))
    assert table.to_env(np.array([[1, 2, 3, 4]])).tolist() == [[[1, 2], [3, 4]]]
    gaussian = distribution_for(BOX)
    assert gaussian.to_env(np.array([[9.0, -9.0]], np.float32)).tolist() == [[3.0, 0.0]]
    squashed = SquashedGaussian(BOX)
    assert squashed.to_env(np.zeros((1, 2), np.float32)).tolist() == [[1.0, 0.25]]  # the middle of both ranges


def test_a_stored_gaussian_action_is_not_clipped():
    ours = Gaussian(spaces.Box(-0.1, 0.1, (1,), np.float32))
    stored = ours.sample(torch.zeros(1, 1), torch.tensor([[2.0]]))
    assert stored.item() == 2.0


def test_squashing_onto_an_unbounded_space_is_refused():
    with pytest.raises(ConfigError, match="needs finite bounds"):
        SquashedGaussian(spaces.Box(-np.inf, np.inf, (1,), np.float32))


def test_a_space_nobody_can_act_in_is_refused_with_what_is_supported():
    with pytest.raises(ConfigError, match="Discrete, MultiDiscrete, MultiBinary, Box"):
        distribution_for(spaces.Text(5))
