"""From a configuration to a policy: ours by name, a user's own by address, mistakes found before anything runs."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from palaestra.errors import ConfigError
from palaestra.policy import ActorCritic, PolicyConfig, build_policy
from palaestra.policy.compiled import CompiledActorCritic, why_not_compiled
from palaestra.policy.flat_parameters import FlatParameters
from palaestra.policy.network import ImageEncoder

VECTOR = spaces.Box(-1, 1, (3,), np.float32)
HERE = __name__


class Linear(nn.Module):
    def __init__(self, observation_space, action_space, width=5):
        super().__init__()
        self.body = nn.Linear(3, width)
        self.head = nn.Linear(width, int(action_space.n) + 1)

    def forward(self, observation):
        out = self.head(self.body(observation))
        return out[:, :-1], out[:, -1]


class TooNarrow(Linear):
    def forward(self, observation):
        parameters, value = super().forward(observation)
        return parameters[:, :-1], value


class Crashes(Linear):
    def forward(self, observation):
        raise ValueError("no idea what to do")


def _built(name="actor_critic", **settings):
    return build_policy(PolicyConfig(name=name, **settings), VECTOR, spaces.Discrete(2), seed=3)


def test_the_same_seed_draws_the_same_weights_and_another_seed_does_not():
    def first_weight(seed):
        return ActorCritic(VECTOR, spaces.Discrete(2), seed=seed).actor[0].weight

    assert torch.equal(first_weight(1), first_weight(1))
    assert not torch.equal(first_weight(1), first_weight(2))


def test_the_first_policy_is_nearly_indifferent_and_its_values_nearly_zero():
    policy = _built()
    parameters, value = policy(torch.randn(100, 3, generator=torch.Generator().manual_seed(0)))
    assert parameters.softmax(-1).sub(0.5).abs().max() < 0.02  # the policy head is drawn with a gain of 0.01
    assert torch.allclose(policy.actor[0].weight.T @ policy.actor[0].weight, 2 * torch.eye(3), atol=1e-5)  # sqrt 2
    assert value.abs().mean() < 2


def test_building_leaves_torchs_own_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    _built()
    _built(f"{HERE}:Linear")
    assert torch.equal(torch.rand(3), expected)


def test_a_network_of_ones_own_is_named_by_its_address_and_takes_keywords():
    policy = _built(f"{HERE}:Linear", kwargs={"width": 7})
    assert policy.network.body.out_features == 7
    assert torch.equal(policy.network.body.weight, _built(f"{HERE}:Linear", kwargs={"width": 7}).network.body.weight)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("actor_critc", {}, "Did you mean 'actor_critic'"),
        ("nowhere:Linear", {}, "cannot be imported"),
        (f"{HERE}:Nothing", {}, "cannot be imported"),
        (f"{HERE}:VECTOR", {}, r"refused them|is not a torch"),
        (f"{HERE}:Linear", {"kwargs": {"depth": 3}}, "refused them.*depth"),
        (f"{HERE}:TooNarrow", {}, r"gave parameters \(1, 1\).*must return \(parameters \[B, 2\], value \[B\]\)"),
        (f"{HERE}:Crashes", {}, "its forward failed on one observation.*no idea what to do"),
    ],
)
def test_a_mistake_in_the_name_is_found_before_anything_runs(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        _built(name, **settings)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (lambda: ActorCritic(VECTOR, spaces.Discrete(2)), None),
        (lambda: ActorCritic(VECTOR, spaces.Box(-1, 1, (2,), np.float32), normalize_observation=True), None),
        (lambda: _built(f"{HERE}:Linear"), "the network is your own"),
        (lambda: ActorCritic(spaces.Box(0, 255, (8, 8, 3), np.uint8), spaces.Discrete(2)), "not a vector"),
        (lambda: ActorCritic(spaces.Discrete(3), spaces.Discrete(2)), "not a vector"),
        (lambda: ActorCritic(VECTOR, spaces.MultiDiscrete([2, 2])), "MultiCategorical actions"),
        (lambda: ActorCritic(VECTOR, spaces.Discrete(2)).double(), "not float32"),
    ],
)
def test_a_policy_runs_compiled_or_there_is_a_reason(policy, reason):
    found = why_not_compiled(policy())
    assert found is None if reason is None else reason in found


def test_not_even_the_largest_noise_makes_the_kernels_draw_what_torch_would_not():
    policy = ActorCritic(VECTOR, spaces.Discrete(40), PolicyConfig(hidden=()), seed=0)
    with torch.no_grad():
        policy.actor[0].bias[30:] = -200.0  # as good as impossible
        policy.actor[0].weight.mul_(300)
    observation = torch.rand(4000, 3, generator=torch.Generator().manual_seed(0))
    noise = np.full((4000, 1), 1.0 - 2.0**-24, np.float32)
    action, log_prob, value = np.zeros(4000, np.int64), np.zeros(4000, np.float32), np.zeros(4000, np.float32)
    net = CompiledActorCritic(policy)
    net.act_into(observation.numpy(), noise, None, action, log_prob, value)
    assert (log_prob > -20).all()
    assert (action < 30).all()


def test_parameters_share_one_vector_with_whoever_asks():
    policy = _built()
    flat = FlatParameters.of(policy)
    assert FlatParameters.of(policy) is flat
    assert flat.vector.numel() == sum(p.numel() for p in policy.parameters())
    with torch.no_grad():
        flat.vector.fill_(0.25)
    assert all((p == 0.25).all() for p in policy.parameters())
    with torch.no_grad():
        policy.actor[0].bias.fill_(3.0)
    assert (flat.vector == 3.0).sum() == policy.actor[0].bias.numel()


def test_weights_loaded_into_the_module_reach_the_vector():
    policy, other = _built(), ActorCritic(VECTOR, spaces.Discrete(2), seed=9)
    flat = FlatParameters.of(policy)
    policy.load_state_dict(other.state_dict())
    assert FlatParameters.of(policy) is flat
    assert torch.equal(flat.vector, FlatParameters.of(other).vector)


def test_parameters_that_were_moved_get_a_new_vector_with_their_values():
    policy = _built()
    before = FlatParameters.of(policy)
    values = before.vector.clone()
    for parameter in policy.parameters():
        parameter.data = parameter.data.clone()
    after = FlatParameters.of(policy)
    assert after is not before
    assert torch.equal(after.vector, values)


@pytest.mark.parametrize("normalize", [False, True])
def test_an_observation_that_is_one_number_without_axes_is_seen(normalize):
    number = spaces.Box(-1, 1, (), np.float32)
    policy = ActorCritic(number, spaces.Discrete(2), normalize_observation=normalize)
    policy.update_statistics(torch.zeros(4))
    parameters, value = policy(torch.zeros(4))
    assert (tuple(parameters.shape), tuple(value.shape)) == ((4, 2), (4,))


PIXELS = {"low": 0, "high": 255, "dtype": np.uint8}


@pytest.mark.parametrize(
    ("shape", "channels"),
    [((84, 84), 1), ((4, 84, 84, 3), 12), ((4, 3, 84, 84), 12), ((84, 84, 3), 3), ((4, 84, 84), 4), ((10, 10), 1)],
)
def test_pixels_of_every_usual_shape_are_read_by_convolutions_and_scaled(shape, channels):
    space = spaces.Box(shape=shape, **PIXELS)
    policy = ActorCritic(space, spaces.Discrete(2), PolicyConfig(hidden=(4,), image_features=8))
    (encoder,) = policy.encoder.images.values()
    assert encoder.convolutions[0].in_channels == channels
    white = torch.full((2, *shape), 255, dtype=torch.uint8)
    parameters, value = policy(white)
    assert (parameters.shape, value.shape) == ((2, 2), (2,))
    # Scaled to 1: the same picture as ones, without the 1/255, gives the same features.
    with torch.no_grad():
        encoder.convolutions[0].weight.mul_(255.0)
    assert torch.allclose(policy(torch.ones_like(white))[0], parameters, atol=1e-5)


def test_a_stack_of_pictures_is_read_picture_by_picture():
    stack = torch.arange(2 * 12 * 12 * 3).reshape(1, 2, 12, 12, 3).remainder(256).to(torch.uint8)
    last = ImageEncoder((2, 12, 12, 3), 5, torch.Generator().manual_seed(0))
    first = ImageEncoder((2, 3, 12, 12), 5, torch.Generator().manual_seed(0))
    joined = ImageEncoder((6, 12, 12), 5, torch.Generator().manual_seed(0))
    moved = stack.permute(0, 1, 4, 2, 3)
    assert torch.equal(last(stack), first(moved))
    assert torch.equal(last(stack), joined(moved.reshape(1, 6, 12, 12)))


def test_the_gradient_of_an_image_encoder_is_that_of_its_layers_one_by_one():
    encoder = ImageEncoder((4, 40, 40), 5, torch.Generator().manual_seed(0))
    pixels = torch.randint(256, (3, 4, 40, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    plain = nn.functional.relu(encoder.project(encoder.convolutions(pixels.float() / 255.0).flatten(1)))
    expected = torch.autograd.grad(plain.square().sum(), list(encoder.parameters()))
    found = torch.autograd.grad(encoder(pixels).square().sum(), list(encoder.parameters()))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_for_activations_and_close_to_float32():
    space, actions = spaces.Box(shape=(40, 40, 3), **PIXELS), spaces.Discrete(3)
    pixels = torch.randint(256, (6, 40, 40, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    exact, rough = (
        ActorCritic(space, actions, PolicyConfig(hidden=(8,), image_precision=precision), seed=3)
        for precision in ("float32", "bfloat16")
    )
    assert all(parameter.dtype is torch.float32 for parameter in rough.parameters())
    near, far = rough.encoder(pixels), exact.encoder(pixels)
    assert near.dtype is torch.float32
    # A bfloat16 has 8 bits: errors of 1/256 per layer, four layers.
    assert 0 < (near - far).norm() / far.norm() < 4 / 256
    rough(pixels)[1].sum().backward()
    assert all(p.grad.dtype is torch.float32 for p in rough.encoder.parameters())


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 255, (128,), np.uint8),
        spaces.Box(0, 9, (10, 10), np.uint8),
        spaces.Box(0, 255, (2, 6), np.uint8),
        spaces.Box(0, 1, (84, 84), np.float32),
    ],
)
def test_bytes_that_are_no_picture_stay_numbers(space):
    policy = ActorCritic(space, spaces.Discrete(2), PolicyConfig(hidden=(4,)))
    assert (len(policy.encoder.images), policy.encoder.size) == (0, int(np.prod(space.shape)))


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((2, 2, 9, 9, 3), "more than four axes"),
        ((4, 84, 84, 84), "84 channels"),
        ((84, 84, 4, 3), "84 pictures of 84 x 4 pixels with 3 channels is unlikely"),
    ],
)
def test_pixels_of_an_unknown_shape_are_refused_with_a_remedy(shape, reason):
    with pytest.raises(ConfigError, match=f"{reason}.*Wrap the environment so that it gives"):
        ActorCritic(spaces.Box(shape=shape, **PIXELS), spaces.Discrete(2))
