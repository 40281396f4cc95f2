"""PPO's objective and its gradient against formulas that share no code with it."""

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from palaestra.learner import PPO
from palaestra.policy import ActorCritic, PolicyConfig


class SoftmaxLinear(nn.Module):
    """The smallest policy there is: logits = x A, value = x v, in float64 so that differences are exact enough."""

    def __init__(self, actor, critic):
        super().__init__()
        self.actor = nn.Parameter(torch.tensor(actor))
        self.critic = nn.Parameter(torch.tensor(critic))

    def evaluate_actions(self, observation, action, *, mask=None):
        logs = (observation @ self.actor).log_softmax(-1)
        log_prob = logs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return log_prob, -(logs.exp() * logs).sum(-1), observation @ self.critic


def _experience(size=40, seed=0):
    rng = np.random.default_rng(seed)
    actor, critic = rng.normal(size=(3, 4)), rng.normal(size=3)
    x, action = rng.normal(size=(size, 3)), rng.integers(4, size=size)
    logits = x @ actor
    log_prob = (logits - np.log(np.exp(logits).sum(1, keepdims=True)))[np.arange(size), action]
    value = x @ critic
    # Other weights acted, so that some ratios and some values lie outside their intervals.
    batch = {
        "observation": x, "action": action, "log_prob": log_prob + 0.3 * rng.normal(size=size),
        "value": value + 0.3 * rng.normal(size=size), "advantage": rng.normal(size=size),
        "target": rng.normal(size=size),
    }  # fmt: skip
    return actor, critic, batch


def _loss(actor, critic, batch, config):
    """PPO's loss in numpy, sentence by sentence as in the papers."""
    rows = np.arange(len(batch["action"]))
    logits = batch["observation"] @ actor
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    advantage = batch["advantage"]
    if config.normalize_advantage:
        advantage = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
    ratio = np.exp(logs[rows, batch["action"]] - batch["log_prob"])
    clipped = np.clip(ratio, 1 - config.clip_range, 1 + config.clip_range)
    policy = -np.minimum(ratio * advantage, clipped * advantage).mean()
    entropy = -(np.exp(logs) * logs).sum(1).mean()
    value = batch["observation"] @ critic
    error = (value - batch["target"]) ** 2
    if config.value_clip is not None:
        held = batch["value"] + np.clip(value - batch["value"], -config.value_clip, config.value_clip)
        error = np.maximum(error, (held - batch["target"]) ** 2)
    return policy - config.entropy_coef * entropy + config.value_coef * 0.5 * error.mean()


def _differences(function, point, width=1e-6):
    gradient = np.zeros_like(point)
    for index in np.ndindex(point.shape):
        moved = np.zeros_like(point)
        moved[index] = width
        gradient[index] = (function(point + moved) - function(point - moved)) / (2 * width)
    return gradient


SETTINGS = [{}, {"value_clip": None}, {"normalize_advantage": False}, {"entropy_coef": 0.3, "clip_range": 0.05}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_gradient_equals_finite_differences_of_the_objective_written_in_numpy(settings):
    actor, critic, batch = _experience()
    ppo = PPO(**settings)
    policy = SoftmaxLinear(actor, critic)
    losses = ppo.losses(policy, {k: torch.tensor(v) for k, v in batch.items()}, clip_range=ppo.config.clip_range)
    total = losses.policy + losses.value
    total.backward()

    assert losses.metrics["clip_fraction"] > 0.1  # the clipped branches are really visited
    assert total.item() == pytest.approx(_loss(actor, critic, batch, ppo.config), abs=1e-12)
    by_actor = _differences(lambda a: _loss(a, critic, batch, ppo.config), actor)
    by_critic = _differences(lambda c: _loss(actor, c, batch, ppo.config), critic)
    assert np.allclose(policy.actor.grad.numpy(), by_actor, atol=1e-8)
    assert np.allclose(policy.critic.grad.numpy(), by_critic, atol=1e-8)


def test_at_ratio_1_the_gradient_is_the_policy_gradient_derived_by_hand():
    # d/dA of -mean(a log pi) is -mean over samples of x outer (onehot - p) a.
    actor, critic, batch = _experience()
    logits = batch["observation"] @ actor
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    onehot = np.eye(4)[batch["action"]]
    batch["log_prob"] = np.log((p * onehot).sum(1))
    by_hand = -(batch["observation"].T @ ((onehot - p) * batch["advantage"][:, None])) / len(p)

    policy = SoftmaxLinear(actor, critic)
    ppo = PPO(normalize_advantage=False, entropy_coef=0.0, value_coef=0.0)
    ppo.losses(policy, {k: torch.tensor(v) for k, v in batch.items()}, clip_range=0.2).policy.backward()
    assert np.allclose(policy.actor.grad.numpy(), by_hand, atol=1e-12)


def test_an_actor_critic_without_hidden_layers_has_the_gradient_of_the_numpy_objective():
    space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    policy = ActorCritic(space, gymnasium.spaces.Discrete(4), PolicyConfig(hidden=()))
    actor, critic, batch = _experience()
    with torch.no_grad():
        policy.actor[0].weight.copy_(torch.tensor(actor.T))
        policy.critic[0].weight.copy_(torch.tensor(critic[None]))
    tensors = {k: torch.tensor(v) if k == "action" else torch.tensor(v).float() for k, v in batch.items()}
    ppo = PPO()
    losses = ppo.losses(policy, tensors, clip_range=0.2)
    (losses.policy + losses.value).backward()
    by_actor = _differences(lambda a: _loss(a, critic, batch, ppo.config), actor)
    by_critic = _differences(lambda c: _loss(actor, c, batch, ppo.config), critic)
    assert np.allclose(policy.actor[0].weight.grad.numpy(), by_actor.T, atol=1e-5)
    assert np.allclose(policy.critic[0].weight.grad.numpy(), by_critic[None], atol=1e-5)


class Says(nn.Module):
    """A fake policy whose answers are written down."""

    def __init__(self, log_prob, value, entropy=0.0):
        super().__init__()
        self._answers = torch.tensor(log_prob), torch.full((len(log_prob),), entropy), torch.tensor(value)

    def evaluate_actions(self, observation, action, *, mask=None):
        return self._answers


def _said(ratios, advantages, *, values=None, old_values=None, targets=None, **settings):
    zeros = [0.0] * len(ratios)
    batch = {
        "observation": None, "action": torch.zeros(len(ratios)), "log_prob": torch.zeros(len(ratios)),
        "advantage": torch.tensor(advantages), "value": torch.tensor(old_values or zeros),
        "target": torch.tensor(targets or zeros),
    }  # fmt: skip
    policy = Says(np.log(ratios).tolist(), values or zeros, entropy=0.25)
    return PPO(**settings).losses(policy, batch, clip_range=0.5)


def test_the_surrogate_takes_the_worse_of_plain_and_clipped():
    # ratio 2 with clip .5: a gain is held at 1.5, a loss counts in full; ratio .25: a gain counts .25, a loss .5.
    losses = _said([2.0, 2.0, 0.25, 0.25], [1.0, -1.0, 1.0, -1.0], normalize_advantage=False)
    assert losses.metrics["policy_loss"].item() == pytest.approx(-(1.5 - 2.0 + 0.25 - 0.5) / 4)
    assert losses.metrics["clip_fraction"].item() == 1.0
    assert losses.policy.item() == pytest.approx(0.1875 - 0.01 * 0.25)  # minus the entropy bonus


def test_the_value_error_takes_the_worse_of_moved_and_held():
    # Old value 0, new value 1, held at .2. Target 1: the held error .64 counts. Target -1: the moved error 4 counts.
    losses = _said([1.0, 1.0], [0.0, 0.0], values=[1.0, 1.0], targets=[1.0, -1.0], normalize_advantage=False)
    assert losses.metrics["value_loss"].item() == pytest.approx(0.5 * (0.64 + 4.0) / 2)
    assert losses.value.item() == pytest.approx(0.5 * 0.5 * (0.64 + 4.0) / 2)


def test_the_kl_is_the_estimator_that_is_never_negative():
    losses = _said([2.0, 0.5], [0.0, 0.0], normalize_advantage=False)
    assert losses.metrics["approx_kl"].item() == pytest.approx(((2 - 1 - np.log(2)) + (0.5 - 1 - np.log(0.5))) / 2)


def test_advantages_are_normalised_within_the_minibatch_and_a_single_sample_is_left_alone():
    losses = _said([1.0, 1.2], [3.0, 5.0])  # mean 4, deviation sqrt 2: they become -1/sqrt 2 and 1/sqrt 2
    assert losses.metrics["policy_loss"].item() == pytest.approx(-(1.2 - 1.0) / np.sqrt(2) / 2, abs=1e-6)
    alone = _said([1.0], [3.0])
    assert alone.metrics["policy_loss"].item() == pytest.approx(-3.0)


def test_the_schedules_fall_in_a_straight_line_and_never_quite_reach_0():
    ppo = PPO(learning_rate=1e-3, learning_rate_schedule="linear", clip_range=0.2, clip_range_schedule="linear")
    assert [ppo.learning_rate(p) for p in (0.0, 0.25, 0.5)] == pytest.approx([1e-3, 7.5e-4, 5e-4])
    assert [ppo.clip_range(p) for p in (0.0, 0.25, 0.5)] == pytest.approx([0.2, 0.15, 0.1])
    assert 0 < ppo.learning_rate(1.0) < 1e-8
    assert PPO(learning_rate=1e-3).learning_rate(0.7) == 1e-3


def test_the_value_target_is_the_advantage_plus_the_old_value_and_the_rollout_keeps_its_keys():
    shape = (3, 2)
    rollout = {
        "observation": torch.arange(6.0).view(3, 2, 1), "action": torch.zeros(shape, dtype=torch.long),
        "log_prob": torch.zeros(shape), "value": torch.full(shape, 2.0), "next_value": torch.full(shape, 2.0),
        "reward": torch.ones(shape), "terminated": torch.zeros(shape, dtype=torch.bool),
        "truncated": torch.zeros(shape, dtype=torch.bool),
    }  # fmt: skip
    before = set(rollout)
    batch = PPO(gamma=0.5, gae_lambda=0.0).prepare(rollout)
    assert batch["advantage"].tolist() == [0.0] * 6  # 1 + .5*2 - 2
    assert batch["target"].tolist() == [2.0] * 6
    assert batch["observation"][:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert set(rollout) == before


def test_scaled_rewards_are_clipped_and_unscaled_ones_never():
    shape = (1, 2)
    rollout = {
        "reward": torch.tensor([[3.0, 50.0]]), "value": torch.zeros(shape), "next_value": torch.zeros(shape),
        "terminated": torch.ones(shape, dtype=torch.bool), "truncated": torch.zeros(shape, dtype=torch.bool),
    }  # fmt: skip
    assert PPO().advantages(rollout).tolist() == [[3.0, 50.0]]
    assert PPO().advantages(rollout | {"reward_scale": torch.ones(shape)}).tolist() == [[3.0, 50.0]]
    assert PPO().advantages(rollout | {"reward_scale": torch.full(shape, 2.0)}).tolist() == [[6.0, 10.0]]
