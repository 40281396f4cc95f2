"""Without autograd the learners compute the same numbers as with it."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from palaestra.errors import NonFiniteError
from palaestra.learner.registry import ALGORITHMS
from palaestra.learner.transitions import TransitionLearner
from palaestra.policy.config import PolicyConfig
from palaestra.policy.off_policy import TRANSITION_POLICIES
from palaestra.policy.off_policy.fused import FusedActor, FusedMLP, why_not_fused

from .linear import random_batch

SEEN = spaces.Box(-1, 1, (5,), np.float32)
CONTINUOUS, DISCRETE = spaces.Box(-2, 2, (2,), np.float32), spaces.Discrete(3)
CASES = [
    ("dqn", DISCRETE, {}),
    ("dqn", DISCRETE, {"double": True, "target_interval": 3, "max_grad_norm": 0.1}),
    ("sac", CONTINUOUS, {}),
    ("sac", CONTINUOUS, {"temperature": 0.3, "target_entropy": 1.0, "target_interval": 2}),
    ("td3_bc", CONTINUOUS, {}),
    ("td3_bc", CONTINUOUS, {"policy_delay": 3, "target_interval": 2, "imitation": 0.5, "max_grad_norm": 1.0}),
    ("iql", CONTINUOUS, {}),
    ("iql", CONTINUOUS, {"beta": 20.0, "expectile": 0.9}),
    ("iql", DISCRETE, {}),
    ("bc", CONTINUOUS, {}),
    ("bc", DISCRETE, {}),
]


def _learner(name, actions, settings, compiled, activation="relu", hidden=(16, 12), normalize=False, kwargs=None):
    cls = ALGORITHMS["transitions"][name]
    config = PolicyConfig(name=cls.policy, hidden=hidden, activation=activation, kwargs=kwargs or {})
    policy = TRANSITION_POLICIES[cls.policy](SEEN, actions, config, seed=1, normalize_observation=normalize)
    algorithm = cls(learning_rate=1e-2, **settings)
    learner = TransitionLearner(policy, algorithm, seed=2, compiled=compiled)
    if normalize:
        policy.fit_normalizer(torch.randn(50, 5, generator=torch.Generator().manual_seed(3)) * 3 + 1)
        learner.sync_buffers()
    return learner


def _compare(make, steps=7, size=9):
    plain, fused = make(compiled=False), make(compiled=True)
    batch = random_batch(plain.policy, steps, size)
    expected, actual = plain.update(batch), fused.update(batch)
    assert why_not_fused(fused.policy) is None
    assert actual == pytest.approx(expected, rel=2e-3, abs=2e-4)
    assert actual.keys() == expected.keys()
    for name, tensor in plain.state().tensors.items():
        assert fused.state().tensors[name].numpy() == pytest.approx(tensor.numpy(), rel=1e-3, abs=5e-5), name
    assert fused.flat.vector.numpy() == pytest.approx(plain.flat.vector.numpy(), rel=1e-3, abs=5e-5)
    assert plain.state().facts == fused.state().facts


@pytest.mark.parametrize(("name", "actions", "settings"), CASES)
def test_the_numbers_are_those_of_autograd(name, actions, settings):
    _compare(lambda compiled: _learner(name, actions, settings, compiled))


@pytest.mark.parametrize("hidden", [(), (6,), (6, 7, 8)])
def test_networks_of_any_depth_and_tanh_agree(hidden):
    _compare(lambda compiled: _learner("sac", CONTINUOUS, {}, compiled, activation="tanh", hidden=hidden))


@pytest.mark.parametrize(("name", "actions"), [("td3_bc", CONTINUOUS), ("dqn", DISCRETE)])
def test_normalised_observations_agree(name, actions):
    _compare(lambda compiled: _learner(name, actions, {}, compiled, normalize=True))


def test_priorities_agree():
    plain, fused = (_learner("dqn", DISCRETE, {}, compiled) for compiled in (False, True))
    batches = []
    for learner in (plain, fused):
        batch = random_batch(learner.policy)
        batch.index = np.zeros((4, 8), np.int64)
        batch.columns["weight"] = np.linspace(0.1, 1.0, 32, dtype=np.float32).reshape(4, 8)
        learner.update(batch)
        batches.append(batch)
    assert batches[1].td_error == pytest.approx(batches[0].td_error, rel=1e-3)


@pytest.mark.parametrize("double", [False, True])
def test_dueling_heads_agree(double):
    _compare(lambda compiled: _learner("dqn", DISCRETE, {"double": double}, compiled, kwargs={"dueling": True}))


@pytest.mark.parametrize(("name", "actions"), [("sac", CONTINUOUS), ("dqn", DISCRETE)])
def test_a_gradient_that_is_not_finite_restores_weights_and_optimiser(name, actions):
    learner = _learner(name, actions, {}, True)
    learner.update(random_batch(learner.policy))
    before, state = learner.flat.vector.clone(), learner.state()
    batch = random_batch(learner.policy, seed=1)
    batch.columns["reward"][3, 0] = np.nan
    with pytest.raises(NonFiniteError, match="gradient of critic is not finite at gradient step 4"):
        learner.update(batch)
    after = learner.state()
    assert torch.equal(learner.flat.vector, before)
    assert after.facts == state.facts
    assert all(torch.equal(after.tensors[key], tensor) for key, tensor in state.tensors.items())


@pytest.mark.parametrize(("name", "actions"), [(name, actions) for name, actions, _ in CASES[::2]])
def test_a_subclass_trains_by_its_own_losses(name, actions):
    class Scaled(ALGORITHMS["transitions"][name]):
        def losses(self, policy, target, batch, step):
            for loss in super().losses(policy, target, batch, step):
                yield loss._replace(loss=0.0 * loss.loss)

    learner = _learner(name, actions, {}, True)
    learner.algorithm = Scaled(learner.algorithm.config)
    before = learner.flat.vector.clone()
    learner.update(random_batch(learner.policy))
    assert torch.equal(learner.flat.vector, before)
    assert learner.algorithm.why_not_compiled(learner.policy) == "Scaled has no update without autograd"


# ---------------------------------------------------------------------- low precision


def test_products_in_bfloat16_stay_close_to_float32():
    layers = [torch.nn.Linear(*sizes) for sizes in ((5, 128), (128, 128), (128, 1))]
    module = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.uniform_(parameter, -0.1, 0.1, generator=generator)
        parameter.grad = torch.zeros_like(parameter)
    x = torch.randn(64, 5, generator=generator)
    exact, rounded = FusedMLP(module, 64), FusedMLP(module, 64, low_precision=True)
    gradients, inputs = [], []
    with torch.no_grad():
        # bfloat16 has eight significant bits.
        assert rounded.forward(x) == pytest.approx(exact.forward(x), abs=2**-8)
        for network in (exact, rounded):
            network.d_out.fill_(1.0)
            network.backward(x)
            gradients.append([parameter.grad.clone() for parameter in module.parameters()])
            inputs.append(torch.zeros(64, 2))
            network.backward_inputs(3, inputs[-1])
    for one, other in zip(gradients[0] + inputs[:1], gradients[1] + inputs[1:], strict=True):
        assert float((one - other).norm()) < 0.04 * float(one.norm())


def test_a_learner_in_bfloat16_keeps_float32_weights_and_learns():
    learner = _learner("bc", CONTINUOUS, {"precision": "bfloat16"}, True, hidden=(64, 64))
    losses = [learner.update(random_batch(learner.policy))["policy_loss"] for _ in range(20)]
    assert learner.flat.vector.dtype == torch.float32
    assert losses[-1] < 0.8 * losses[0]


def test_the_gradient_of_some_rows_is_theirs_alone():
    learner = _learner("sac", CONTINUOUS, {}, True)
    network = FusedMLP(learner.policy.critic[0], 4)
    whole, part = torch.zeros(4, 2), torch.full((4, 2), 7.0)
    with torch.no_grad():
        network.forward(torch.randn(4, 7, generator=torch.Generator().manual_seed(1)))
        network.d_out.copy_(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
        network.backward_inputs(5, whole)
        network.backward_inputs(5, part, torch.tensor([1, 3]))
        network.backward_inputs(5, part, torch.tensor([], dtype=torch.int64))
    assert part[[1, 3]].numpy() == pytest.approx(whole[[1, 3]].numpy(), rel=1e-5)
    assert part[[0, 2]].tolist() == [[7.0, 7.0]] * 2


@pytest.mark.parametrize(
    ("name", "actions"), [(name, actions) for name, actions, _ in CASES[::2]] + [("iql", DISCRETE)]
)
def test_exploration_agrees(name, actions):
    learner = _learner(name, actions, {}, True, normalize=True)
    policy = learner.policy
    if hasattr(policy.distribution, "exploration"):
        policy.distribution.exploration.fill_(0.4)
    rng = np.random.default_rng(0)
    uniform = policy.distribution.noise_kind == "uniform"
    draw = rng.random if uniform else rng.standard_normal
    noise = draw((50, policy.distribution.noise_size), dtype=np.float32)
    observation = rng.standard_normal((50, 5), dtype=np.float32)
    expected = policy.explore(torch.from_numpy(observation), torch.from_numpy(noise)).detach().numpy()
    actual = FusedActor(policy, 50).explore(observation, noise)
    assert actual == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
