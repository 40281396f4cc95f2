"""The compiled path against an independent judge: torch's autograd on the readable PPO."""

import gymnasium
import numpy as np
import pytest
import torch

from palaestra.errors import ExperienceError
from palaestra.learner.adam import Adam
from palaestra.learner.compiled import CompiledPPO, compiled_gae
from palaestra.learner.ppo import PPO
from palaestra.learner.returns import gae
from palaestra.learner.update import run_epochs
from palaestra.policy import ActorCritic, PolicyConfig
from palaestra.policy.compiled import CompiledActorCritic, RowActor
from palaestra.policy.flat_parameters import FlatParameters

SPACES = {
    "discrete": gymnasium.spaces.Discrete(3),
    "gaussian": gymnasium.spaces.Box(-1, 1, (2,), np.float32),
}
OBSERVATION = gymnasium.spaces.Box(-np.inf, np.inf, (5,), np.float32)


def _policy(kind, hidden=(32, 48), activation="tanh", normalize=False):
    config = PolicyConfig(hidden=hidden, activation=activation, log_std_init=-0.3)
    policy = ActorCritic(OBSERVATION, SPACES[kind], config, normalize_observation=normalize, seed=3)
    with torch.no_grad():
        for parameter in policy.parameters():  # away from the special starting point
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return policy


def _batch(policy, size=96, seed=0):
    g = torch.Generator().manual_seed(seed)
    observation = torch.randn(size, 5, generator=g)
    noise_size = policy.distribution.noise_size
    uniform = policy.distribution.noise_kind == "uniform"
    noise = torch.rand(size, noise_size, generator=g) if uniform else torch.randn(size, noise_size, generator=g)
    with torch.no_grad():
        acted = policy.act(observation, noise)
    shift = 0.3 * torch.randn(size, generator=g)  # as if other weights had acted, so that clipping happens
    value = acted.value + 0.3 * torch.randn(size, generator=g)
    advantage = torch.randn(size, generator=g)
    return {
        "observation": observation, "action": acted.action, "log_prob": acted.log_prob + shift,
        "value": value, "advantage": advantage, "target": value + advantage,
    }  # fmt: skip


def _learned(kind, compiled, settings, *, threads=2, **policy_settings):
    policy = _policy(kind, **policy_settings)
    algorithm = PPO(**settings)
    adam = Adam(FlatParameters.of(policy), algorithm.config.adam_eps)
    batch = _batch(policy)
    rng = np.random.default_rng(5)
    order = torch.from_numpy(np.stack([rng.permutation(96) for _ in range(algorithm.config.n_epochs)]))
    arguments = {"rate": algorithm.config.learning_rate, "clip_range": algorithm.config.clip_range}
    if compiled:
        learner = CompiledPPO(CompiledActorCritic(policy), algorithm.config, adam, threads=threads)
        metrics = learner.learn(batch, order, **arguments)
    else:
        metrics = run_epochs(policy, algorithm, adam, batch, order, **arguments)
    return FlatParameters.of(policy), metrics


SETTINGS = [
    {"n_epochs": 1, "batch_size": 96},
    {"n_epochs": 3, "batch_size": 32},
    {"n_epochs": 2, "batch_size": 40},  # the last minibatch has 16
    {"n_epochs": 3, "batch_size": 32, "grad_clip": "global"},
    {"n_epochs": 3, "batch_size": 32, "value_clip": None, "max_grad_norm": None, "normalize_advantage": False},
    {"n_epochs": 4, "batch_size": 32, "target_kl": 0.01, "learning_rate": 3e-3},  # stops at once
    {"n_epochs": 4, "batch_size": 32, "target_kl": 0.05, "learning_rate": 3e-3},  # stops on the way
    {"n_epochs": 4, "batch_size": 32, "target_kl": 0.05, "learning_rate": 3e-3, "grad_clip": "global"},
]


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_compiled_path_learns_the_same_weights_and_reports_the_same_numbers(kind, settings):
    plain, said_plainly = _learned(kind, False, settings)
    fast, said_fast = _learned(kind, True, settings)
    assert torch.allclose(plain.vector, fast.vector, atol=2e-6, rtol=1e-5)
    assert said_fast.keys() == said_plainly.keys()
    for name, number in said_plainly.items():
        assert said_fast[name] == pytest.approx(number, abs=2e-5, rel=2e-4), name


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("hidden", [(), (16,), (64, 64), (32, 8, 40)], ids=str)
def test_compiled_gradients_equal_autograd_for_any_depth_and_width(kind, activation, hidden):
    settings = {"n_epochs": 1, "batch_size": 96}
    plain, _ = _learned(kind, False, settings, activation=activation, hidden=hidden)
    fast, _ = _learned(kind, True, settings, activation=activation, hidden=hidden)
    scale = plain.gradient.abs().max()
    assert float((plain.gradient - fast.gradient).abs().max() / scale) < 2e-6


def test_one_thread_and_two_threads_learn_bit_for_bit_the_same():
    one, _ = _learned("gaussian", True, {"n_epochs": 4, "batch_size": 32}, threads=1)
    two, _ = _learned("gaussian", True, {"n_epochs": 4, "batch_size": 32}, threads=2)
    assert torch.equal(one.vector, two.vector)


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("normalize", [False, True])
def test_compiled_acting_draws_the_actions_that_torch_draws(kind, normalize):
    policy = _policy(kind, normalize=normalize)
    if normalize:
        policy.update_statistics(2.0 + 3.0 * torch.randn(500, 5, generator=torch.Generator().manual_seed(2)))
    rng = np.random.default_rng(0)
    observation = rng.standard_normal((200, 5)).astype(np.float32)
    size = policy.distribution.noise_size
    noise = rng.random((200, size), np.float32) if kind == "discrete" else rng.standard_normal((200, size), np.float32)
    with torch.no_grad():
        plain = policy.act(torch.from_numpy(observation), torch.from_numpy(noise))
    net = CompiledActorCritic(policy)
    action = np.zeros((200, *policy.distribution.action_shape), policy.distribution.action_dtype)
    log_prob, value = np.zeros(200, np.float32), np.zeros(200, np.float32)
    net.act_into(observation, noise, None, action, log_prob, value)
    assert np.allclose(action, plain.action.numpy(), atol=1e-5)
    assert np.allclose(log_prob, plain.log_prob.numpy(), atol=1e-5)
    assert np.allclose(value, plain.value.numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("normalize", [False, True])
def test_acting_row_by_row_gives_the_bits_of_acting_on_a_batch(kind, normalize):
    policy = _policy(kind, normalize=normalize)
    if normalize:
        policy.update_statistics(2.0 + 3.0 * torch.randn(500, 5, generator=torch.Generator().manual_seed(2)))
    rng, shape = np.random.default_rng(0), (3, 8)
    observation = rng.standard_normal((4, 8, 5)).astype(np.float32)
    size = policy.distribution.noise_size
    noise = rng.random((*shape, size), np.float32) if kind == "discrete" else rng.standard_normal((*shape, size), "f4")
    net = CompiledActorCritic(policy)
    one, other = (
        (
            np.zeros((*shape, *policy.distribution.action_shape), policy.distribution.action_dtype),
            np.zeros(shape, np.float32),
            np.zeros(shape, np.float32),
        )
        for _ in range(2)
    )
    assert RowActor.fits(observation, noise, *other)
    rows = RowActor(net, observation, noise, *other)
    for t in range(3):
        net.act_into(observation[t], noise[t], None, *(array[t] for array in one))
        rows.act(t)
    for expected, array in zip(one, other, strict=True):
        assert array.tobytes() == expected.tobytes()
    if rows.env_action is not None:
        assert np.array_equal(rows.env_action, policy.distribution.to_env(one[0]))


def test_acting_row_by_row_sees_statistics_that_changed_only_after_a_refresh():
    policy = _policy("discrete", normalize=True)
    net = CompiledActorCritic(policy)
    observation, noise = np.ones((2, 1, 5), np.float32), np.zeros((1, 1, 1), np.float32)
    action, log_prob, value = np.zeros((1, 1), np.int64), np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32)
    rows = RowActor(net, observation, noise, action, log_prob, value)
    policy.update_statistics(torch.full((10, 5), 7.0) + torch.arange(10.0).unsqueeze(1))
    rows.act(0)
    before = float(value[0, 0])
    rows.refresh()
    rows.act(0)
    assert value[0] == pytest.approx(net.value(observation[0]), abs=1e-6)
    assert abs(value[0, 0] - before) > 1e-3


def test_rows_that_do_not_fit_together_are_refused():
    net = CompiledActorCritic(_policy("discrete", normalize=False))
    arrays = [np.zeros((2, 3), np.float32) for _ in range(2)]
    noise, action = np.zeros((2, 3, 1), np.float32), np.zeros((2, 3), np.int64)
    with pytest.raises(ExperienceError, match="do not fit 2 steps of 3 environments"):
        RowActor(net, np.zeros((3, 3, 4), np.float32), noise, action, *arrays)
    assert not RowActor.fits(np.zeros((3, 3, 5), np.uint8), noise, action, *arrays)


def test_compiled_gae_equals_the_plain_one():
    g = torch.Generator().manual_seed(0)
    shape = (40, 6)
    rollout = {
        "value": torch.randn(shape, generator=g),
        "next_value": torch.randn(shape, generator=g),
        "terminated": torch.rand(shape, generator=g) < 0.1,
        "truncated": torch.rand(shape, generator=g) < 0.1,
    }
    reward = torch.randn(shape, generator=g)
    plain = gae(
        reward, rollout["value"], rollout["next_value"], terminated=rollout["terminated"],
        truncated=rollout["truncated"], discount=0.97, lam=0.9,
    )  # fmt: skip
    assert torch.allclose(compiled_gae(rollout, reward, discount=0.97, lam=0.9), plain, atol=1e-5)
