"""SAC, TD3+BC, IQL and behaviour cloning compute what their papers say, by numbers done by hand."""

import math

import pytest
import torch
from gymnasium import spaces

from palaestra.learner.transitions import BC, IQL, SAC, TD3BC
from palaestra.policy.off_policy import ClonedActor, DeterministicActorCritic, ImplicitQ, SoftActorCritic

from .linear import linear_policy, rows


def _losses(algorithm, policy, target, batch, step=0):
    return {one.group: one for one in algorithm.losses(policy, target, batch, step)}


def _number(step):
    return float(step.loss.detach())


# ---------------------------------------------------------------------- SAC


def _soft(critics=([[1.0, 0.0]], [[2.0, 0.0]]), actor=((0.25,), (0.0,))):
    # The actor gives the mean 0.25 s and the log standard deviation 0; the critics value s, and 2 s.
    return linear_policy(SoftActorCritic, actor=[list(row) for row in actor], critic=critics)


def _log_density(mean, noise):
    """Of tanh(mean + noise) with deviation 1, by the change of variables."""
    u = mean + noise
    return -0.5 * noise**2 - 0.5 * math.log(2 * math.pi) - math.log(1 - math.tanh(u) ** 2)


def test_sac_moves_critics_towards_the_smaller_target_value_minus_the_weighted_log_probability():
    policy, target = _soft(), _soft(critics=([[4.0, 0.0]], [[3.0, 0.0]]))
    losses = _losses(SAC(gamma=0.5, temperature=0.2), policy, target, rows(noise=[[0.3, -0.1]]))
    # At s' = 2 the mean is 0.5 and the smaller target value 3 * 2.
    wanted = 1.0 + 0.5 * (6.0 - 0.2 * _log_density(0.5, -0.1))
    assert _number(losses["critic"]) == pytest.approx(0.5 * ((3.0 - wanted) ** 2 + (6.0 - wanted) ** 2), rel=1e-5)
    assert set(losses) == {"critic", "actor"}


def test_sac_ignores_the_future_after_termination():
    losses = _losses(SAC(temperature=0.2), _soft(), _soft(), rows(terminated=[True], noise=[[0.3, -0.1]]))
    assert _number(losses["critic"]) == pytest.approx(0.5 * ((3.0 - 1.0) ** 2 + (6.0 - 1.0) ** 2), rel=1e-5)


def test_the_actor_of_sac_weighs_its_log_probability_against_the_smaller_value():
    # The critics value s + a and 2 s + 5 a; at s = 3 the first one is smaller for any action.
    policy = _soft(critics=([[1.0, 1.0]], [[2.0, 5.0]]))
    losses = _losses(SAC(temperature=0.2), policy, _soft(), rows(noise=[[0.3, -0.1]]))
    action = math.tanh(0.75 + 0.3)
    assert _number(losses["actor"]) == pytest.approx(0.2 * _log_density(0.75, 0.3) - (3.0 + action), rel=1e-5)
    assert float(losses["actor"].metrics["entropy"]) == pytest.approx(-_log_density(0.75, 0.3), rel=1e-5)


def test_the_temperature_rises_while_the_entropy_is_below_its_aim():
    # Deviation exp(-3): the entropy is far below the aim of -1.
    policy = _soft(actor=((0.0,), (-1.0,)))
    step = next(iter(SAC().losses(policy, _soft(), rows(noise=[[0.3, -0.1]]), 0)))
    (slope,) = torch.autograd.grad(step.loss, [policy.temperature])
    log_prob = policy.distribution.sample_with_log_prob(torch.tensor([[0.0, -3.0]]), torch.tensor([[0.3]]))[1]
    assert step.group == "temperature"
    assert float(slope) == pytest.approx(-(float(log_prob) - 1.0), rel=1e-5)
    assert float(slope) < 0  # minimising raises it


def test_the_density_of_squashed_actions_is_exact_where_tanh_saturates():
    distribution = _soft().distribution
    parameters = torch.tensor([[30.0, 0.0]])
    action, log_prob = distribution.sample_with_log_prob(parameters, torch.zeros(1, 1))
    # log(1 - tanh(30)^2) is log 4 - 60; computed naively it is log 0.
    assert action.tolist() == [[1.0]]
    assert float(log_prob) == pytest.approx(-0.5 * math.log(2 * math.pi) - (math.log(4) - 60.0), rel=1e-6)


# ---------------------------------------------------------------------- TD3+BC


def _deterministic(actor=0.5, critics=([[1.0, 0.0]], [[2.0, 0.0]])):
    return linear_policy(DeterministicActorCritic, actor=[[actor]], critic=critics)


def test_td3_adds_clipped_noise_to_the_target_action_and_takes_the_smaller_value():
    # The critics of the target value s + 10 a, and s + 20 a.
    target = _deterministic(critics=([[1.0, 10.0]], [[1.0, 20.0]]))
    algorithm = TD3BC(gamma=0.5, target_noise=0.2, target_noise_clip=0.1)
    losses = _losses(algorithm, _deterministic(), target, rows(noise=[[-3.0]]))
    wanted = 1.0 + 0.5 * (2.0 + 10.0 * (math.tanh(1.0) - 0.1))
    assert _number(losses["critic"]) == pytest.approx((3.0 - wanted) ** 2 + (6.0 - wanted) ** 2, rel=1e-5)


def test_td3_bc_trains_the_actor_every_second_step():
    steps = [set(_losses(TD3BC(), _deterministic(), _deterministic(), rows(noise=[[0.0]]), n)) for n in range(4)]
    assert steps == [{"critic"}, {"critic", "actor"}, {"critic"}, {"critic", "actor"}]


def test_the_actor_of_td3_bc_weighs_the_value_by_its_mean_size_against_the_distance_to_the_data():
    # The first critic values s + 10 a; at s = 3 the actor gives tanh(1.5), at s = -1 it gives tanh(-0.5).
    policy = _deterministic(critics=([[1.0, 10.0]], [[0.0, 0.0]]))
    batch = rows(
        observation=(3.0, -1.0),
        action=(0.5, 0.0),
        reward=(0.0, 0.0),
        following=(0.0, 0.0),
        terminated=(False, False),
        noise=[[0.0], [0.0]],
    )
    losses = _losses(TD3BC(alpha=2.5), policy, _deterministic(), batch, step=1)
    a, b = math.tanh(1.5), math.tanh(-0.5)
    values = 3.0 + 10.0 * a, -1.0 + 10.0 * b
    scale = 2.5 / (0.5 * (abs(values[0]) + abs(values[1])))
    distance = 0.5 * ((a - 0.5) ** 2 + b**2)
    assert _number(losses["actor"]) == pytest.approx(-scale * 0.5 * sum(values) + distance, rel=1e-5)


# ---------------------------------------------------------------------- IQL


def _implicit(critics=([[1.0, 0.0]], [[2.0, 0.0]]), value=0.5, actor=0.5):
    return linear_policy(ImplicitQ, actor=[[actor]], critic=critics, value_network=[[value]])


@pytest.mark.parametrize(("critic", "share"), [(1.0, 0.7), (0.1, 0.3)])
def test_the_value_of_iql_is_an_expectile_of_the_smaller_target_value(critic, share):
    # V(3) is 1.5; the smaller target value is 3 (above it), or 0.3 (below it).
    target = _implicit(critics=([[critic, 0.0]], [[9.0, 0.0]]))
    losses = _losses(IQL(expectile=0.7), _implicit(), target, rows())
    assert _number(losses["value_network"]) == pytest.approx(share * (3.0 * critic - 1.5) ** 2, rel=1e-5)


def test_the_critics_of_iql_learn_the_reward_plus_the_value_of_the_next_observation():
    losses = _losses(IQL(gamma=0.5), _implicit(), _implicit(), rows())
    wanted = 1.0 + 0.5 * (0.5 * 2.0)
    assert _number(losses["critic"]) == pytest.approx(0.5 * ((3.0 - wanted) ** 2 + (6.0 - wanted) ** 2), rel=1e-5)


@pytest.mark.parametrize(("beta", "weight"), [(2.0, math.exp(2.0 * 1.5)), (10.0, 100.0)])
def test_the_actor_of_iql_imitates_in_proportion_to_the_clamped_exponential_of_the_advantage(beta, weight):
    # The advantage is 3 - 1.5; exp(15) is clamped to 100. The mean is tanh(1.5), the deviation 1.
    losses = _losses(IQL(beta=beta), _implicit(), _implicit(), rows())
    log_prob = -0.5 * (0.5 - math.tanh(1.5)) ** 2 - 0.5 * math.log(2 * math.pi)
    assert _number(losses["actor"]) == pytest.approx(-weight * log_prob, rel=1e-5)


def test_iql_learns_discrete_actions_by_the_same_rules():
    # Critics and actor have one output per action: values s and 4 s, 2 s and 3 s; logits 0 and s.
    policy = linear_policy(
        ImplicitQ,
        spaces.Discrete(2),
        actor=[[0.0], [1.0]],
        critic=([[1.0], [4.0]], [[2.0], [3.0]]),
        value_network=[[0.5]],
    )
    losses = _losses(IQL(gamma=0.5, beta=0.1), policy, policy, rows(action=(1,)))
    assert _number(losses["value_network"]) == pytest.approx(0.7 * (9.0 - 1.5) ** 2, rel=1e-5)
    assert _number(losses["critic"]) == pytest.approx(0.5 * ((12.0 - 1.5) ** 2 + (9.0 - 1.5) ** 2), rel=1e-5)
    assert _number(losses["actor"]) == pytest.approx(math.exp(0.75) * math.log(1 + math.exp(-3.0)), rel=1e-5)


def test_the_learning_rate_of_the_actor_of_iql_follows_a_cosine():
    algorithm = IQL(learning_rate=1e-3)
    assert [algorithm.learning_rates(share)["actor"] for share in (0.0, 0.5)] == pytest.approx([1e-3, 5e-4])
    assert algorithm.learning_rate(0.5) == 1e-3


# ---------------------------------------------------------------------- behaviour cloning


def test_cloning_continuous_actions_minimises_their_squared_distance():
    losses = _losses(BC(), linear_policy(ClonedActor, actor=[[0.5]]), None, rows())
    assert _number(losses["actor"]) == pytest.approx((math.tanh(1.5) - 0.5) ** 2, rel=1e-5)


def test_cloning_discrete_actions_minimises_the_cross_entropy():
    policy = linear_policy(ClonedActor, spaces.Discrete(2), actor=[[0.0], [1.0]])
    losses = _losses(BC(), policy, None, rows(action=(0,)))
    assert _number(losses["actor"]) == pytest.approx(math.log(1 + math.exp(3.0)), rel=1e-5)
