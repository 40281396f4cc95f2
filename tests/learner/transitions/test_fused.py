"""Updates without autograd take the same steps as the losses that define them."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from palaestra.errors import NonFiniteError
from palaestra.experience.replay import TransitionBatch
from palaestra.learner.transitions import BC, DQN, IQL, SAC, TD3BC
from palaestra.learner.transitions.dense import DensePass, DenseWeights
from palaestra.learner.transitions.learner import TransitionLearner
from palaestra.policy.config import PolicyConfig
from palaestra.policy.off_policy import TRANSITION_POLICIES

OBSERVATION = spaces.Box(-np.inf, np.inf, (5,), np.float32)
ACTION = spaces.Box(-2.0, 2.0, (2,), np.float32)
STEPS, ROWS = 7, 16


def _batch(action_space, *, index=None, seed=0):
    rng = np.random.default_rng(seed)
    shape = (STEPS, ROWS)
    if isinstance(action_space, spaces.Discrete):
        action = rng.integers(action_space.n, size=shape)
    else:
        action = rng.uniform(-1, 1, (*shape, *action_space.shape)).astype(np.float32)
    columns = {
        "observation": rng.standard_normal((*shape, 5), dtype=np.float32),
        "action": action,
        "reward": 3 * rng.standard_normal(shape, dtype=np.float32),
        "next_observation": rng.standard_normal((*shape, 5), dtype=np.float32),
        "terminated": rng.random(shape) < 0.3,
    }
    if index is not None:
        columns["weight"] = rng.random(shape, dtype=np.float32)
    return TransitionBatch(columns, index)


def _learner(algorithm, action_space, *, compiled, hidden=(24, 40), activation="relu", normalize=True, **kwargs):
    config = PolicyConfig(name=algorithm.policy, hidden=hidden, activation=activation, kwargs=kwargs)
    family = TRANSITION_POLICIES[algorithm.policy]
    policy = family(OBSERVATION, action_space, config, normalize_observation=normalize, seed=3)
    if normalize:
        policy.fit_normalizer(torch.from_numpy(_batch(action_space).columns["observation"]).flatten(0, 1))
    return TransitionLearner(policy, algorithm, seed=1, compiled=compiled)


def _compare(algorithm, action_space, *, index=None, **options):
    reference = _learner(algorithm, action_space, compiled=False, **options)
    fused = _learner(algorithm, action_space, compiled=True, **options)
    for seed in range(3):
        one, other = _batch(action_space, index=index, seed=seed), _batch(action_space, index=index, seed=seed)
        expected, metrics = reference.update(one), fused.update(other)
        assert metrics.keys() == expected.keys()
        for name, number in expected.items():
            assert metrics[name] == pytest.approx(number, rel=2e-3, abs=1e-4), name
        if index is not None:
            np.testing.assert_allclose(other.td_error, one.td_error, rtol=1e-3, atol=1e-4)
    assert fused._compiled is not None
    assert fused.gradient_steps == reference.gradient_steps == 3 * STEPS
    torch.testing.assert_close(fused.flat.vector, reference.flat.vector, rtol=1e-3, atol=2e-4)
    torch.testing.assert_close(fused._target_flat.vector, reference._target_flat.vector, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    "algorithm",
    [
        SAC(learning_rate=1e-3),
        SAC(temperature=0.3, max_grad_norm=0.5),
        TD3BC(learning_rate=1e-3),
        TD3BC(imitation=0.0, policy_delay=1, target_interval=3),
        IQL(learning_rate=1e-3),
        BC(learning_rate=1e-3),
    ],
    ids=["sac", "sac-fixed-clipped", "td3_bc", "td3", "iql", "bc"],
)
def test_a_fused_update_takes_the_steps_of_the_losses(algorithm):
    _compare(algorithm, ACTION)


@pytest.mark.parametrize("hidden", [(), (32,), (70, 70, 70)], ids=str)
def test_networks_of_any_depth_are_fused(hidden):
    _compare(TD3BC(learning_rate=1e-3), ACTION, hidden=hidden, normalize=False)


def test_a_fused_update_reports_the_errors_that_become_priorities():
    _compare(SAC(), ACTION, index=np.zeros((STEPS, ROWS), np.int64))


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dueling", [False, True])
def test_the_kernel_of_dqn_takes_the_steps_of_the_loss(double, dueling):
    algorithm = DQN(learning_rate=1e-3, double=double, max_grad_norm=0.7, target_interval=3, target_tau=0.5)
    _compare(algorithm, spaces.Discrete(3), index=np.zeros((STEPS, ROWS), np.int64), dueling=dueling)


def test_the_kernel_of_dqn_has_networks_with_tanh():
    _compare(DQN(), spaces.Discrete(3), activation="tanh")


@pytest.mark.parametrize("algorithm", [IQL(), BC()], ids=["iql", "bc"])
def test_discrete_actions_of_offline_learners_use_autograd(algorithm):
    learner = _learner(algorithm, spaces.Discrete(3), compiled=True)
    learner.update(_batch(spaces.Discrete(3)))
    assert learner._compiled is None


@pytest.mark.parametrize(
    ("algorithm", "action_space"), [(SAC(), ACTION), (DQN(), spaces.Discrete(3))], ids=["sac", "dqn"]
)
def test_an_update_with_a_gradient_that_is_not_finite_restores_weights_and_optimiser(algorithm, action_space):
    learner = _learner(algorithm, action_space, compiled=True)
    learner.update(_batch(action_space))
    before, state = learner.flat.vector.clone(), learner.state()
    batch = _batch(action_space, seed=1)
    batch.columns["reward"][STEPS - 1, 0] = np.nan
    with pytest.raises(NonFiniteError, match=f"gradient of critic is not finite at gradient step {STEPS}"):
        learner.update(batch)
    after = learner.state()
    assert torch.equal(learner.flat.vector, before)
    assert after.facts == state.facts
    assert all(torch.equal(after.tensors[name], tensor) for name, tensor in state.tensors.items())


def test_products_in_bfloat16_stay_close_to_float32():
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(5, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1)
    )
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x, ones = torch.randn(64, 5), torch.ones(64, 1)
    exact = DensePass(DenseWeights(module), 64)
    rounded = DensePass(DenseWeights(module, low_precision=True), 64)
    with torch.no_grad():
        # bfloat16 has eight significant bits.
        torch.testing.assert_close(rounded.forward(x), exact.forward(x), rtol=0, atol=2**-8)
        exact.backward(ones)
        expected = [parameter.grad.clone() for parameter in module.parameters()]
        rounded.backward(ones)
        for parameter, gradient in zip(module.parameters(), expected, strict=True):
            assert float((parameter.grad - gradient).norm()) < 0.02 * float(gradient.norm())


def test_a_learner_in_bfloat16_keeps_float32_weights_and_learns():
    learner = _learner(BC(learning_rate=1e-3, precision="bfloat16"), ACTION, compiled=True, hidden=(64, 64))
    losses = [learner.update(_batch(ACTION))["policy_loss"] for _ in range(20)]
    assert learner.flat.vector.dtype == torch.float32
    assert losses[-1] < 0.8 * losses[0]
