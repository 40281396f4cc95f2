"""Experience of older weights: V-trace and the three-policy objective, in numbers one can check by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, tensor

from palaestra.env import EnvConfig, make_env
from palaestra.learner import PPO
from palaestra.learner.compiled import compiled_vtrace
from palaestra.learner.ppo import reevaluate
from palaestra.learner.returns import gae, vtrace
from palaestra.learner.rollout_learner import stale_steps
from palaestra.policy import ActorCritic
from palaestra.train import Trainer

NEVER = tensor([[False], [False]])


def _column(*numbers):
    return tensor(numbers).unsqueeze(1)


def test_with_ratios_of_1_vtrace_is_gae():
    reward, value, next_value = _column(1.0, 2.0), _column(0.5, 0.25), _column(0.25, 4.0)
    ends = {"terminated": NEVER, "truncated": NEVER, "discount": 0.5, "lam": 0.5}
    advantage, target = vtrace(reward, value, next_value, torch.zeros(2, 1), **ends)
    assert torch.equal(advantage, gae(reward, value, next_value, **ends))
    assert torch.equal(target, advantage + value)


def test_vtrace_with_lambda_1_is_as_published():
    reward, value, next_value = _column(1.0, 1.0), _column(0.0, 1.0), _column(1.0, 2.0)
    ratios = torch.log(_column(0.5, 3.0))
    advantage, target = vtrace(
        reward, value, next_value, ratios, terminated=NEVER, truncated=NEVER, discount=0.5, lam=1.0
    )
    # Step 2: delta = 1 + .5 * 2 - 1 = 1, rho = min(3, 1) = 1: target 1 + 1 = 2.
    # Step 1: delta = 1 + .5 * 1 - 0 = 1.5, rho = c = .5: target 0 + .5 * 1.5 + .5 * .5 * (2 - 1) = 1.
    assert target.flatten().tolist() == [1.0, 2.0]
    # r + .5 * v_{s+1} - V(s): 1 + .5 * 2 - 0 = 2, and 1 + .5 * 2 - 1 = 1; the step's own weight is not in it.
    assert advantage.flatten().tolist() == [2.0, 1.0]


def test_an_action_today_s_policy_would_never_take_cuts_the_trace():
    reward, zero = _column(1.0, 100.0), _column(0.0, 0.0)
    ratios = _column(0.0, -1e9)
    ends = {"terminated": NEVER, "truncated": NEVER, "discount": 1.0, "lam": 1.0}
    advantage, target = vtrace(reward, zero, zero, ratios, **ends)
    assert target.flatten().tolist() == [1.0, 0.0]
    assert advantage[0].item() == 1.0  # the 100 that only the other policy would have found does not count


def test_a_truncated_step_bootstraps_and_passes_nothing_back():
    reward, value, next_value = _column(0.0, 5.0), _column(0.0, 0.0), _column(3.0, 0.0)
    _, target = vtrace(
        reward, value, next_value, torch.zeros(2, 1), terminated=NEVER, truncated=tensor([[True], [False]]),
        discount=1.0, lam=1.0,
    )  # fmt: skip
    assert target.flatten().tolist() == [3.0, 5.0]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_the_compiled_vtrace_is_the_plain_one(steps, envs, seed):
    rng = np.random.default_rng(seed)
    numbers = [torch.from_numpy(rng.normal(size=(steps, envs)).astype(np.float32)) for _ in range(4)]
    ends = {key: torch.from_numpy(rng.random((steps, envs)) < 0.2) for key in ("terminated", "truncated")}
    shape = {"discount": 0.9, "lam": 0.8, "rho_bar": 1.2, "c_bar": 0.7}
    rollout = {"value": numbers[1], "next_value": numbers[2], **ends}
    fast = compiled_vtrace(rollout, numbers[0], numbers[3], **shape)
    for mine, theirs in zip(fast, vtrace(*numbers, **ends, **shape), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


class Coin(nn.Module):
    """Says heads (1) with probability `p`, whatever it sees; values everything at `worth`."""

    def __init__(self, p, worth):
        super().__init__()
        self.p, self.worth = nn.Parameter(tensor(p)), worth

    def evaluate_actions(self, observation, action, *, mask=None):
        log_prob = torch.where(action == 1, self.p.log(), (1 - self.p).log())
        return log_prob, torch.zeros_like(log_prob), torch.full_like(log_prob, self.worth)


def _two_steps(versions):
    """Heads and tails, drawn by a fair coin that valued both steps at 1."""
    return {
        "observation": torch.zeros(2, 1, 1), "action": tensor([[1], [0]]), "value": torch.ones(2, 1),
        "log_prob": torch.full((2, 1), math.log(0.5)), "next_value": _column(1.0, 7.0), "reward": _column(1.0, 1.0),
        "terminated": NEVER, "truncated": NEVER, "reward_scale": torch.ones(2, 1),
        "policy_version": tensor(versions).unsqueeze(1),
    }  # fmt: skip


def test_fresh_experience_is_not_stale():
    assert stale_steps(_two_steps([4, 4]), 4) is None
    assert stale_steps(_two_steps([3, 4]), 4).flatten().tolist() == [True, False]


def test_stale_steps_are_seen_with_today_s_eyes_and_fresh_ones_left_alone():
    rollout = _two_steps([3, 4])
    current, log_weight = reevaluate(Coin(0.8, worth=5.0), rollout, stale_steps(rollout, 4))
    assert log_weight.exp().flatten().tolist() == pytest.approx([1.6, 1.0])  # .8 / .5, and exactly 1
    assert log_weight[1].item() == 0.0
    assert current["value"].flatten().tolist() == [5.0, 1.0]
    assert current["next_value"].flatten().tolist() == [1.0, 7.0]  # what follows step 1 is fresh; 7 is all we know
    assert rollout["value"].flatten().tolist() == [1.0, 1.0]


def test_what_follows_a_stale_step_is_valued_today_too():
    rollout = _two_steps([3, 3])
    current, _ = reevaluate(Coin(0.8, worth=5.0), rollout, stale_steps(rollout, 4))
    assert current["next_value"].flatten().tolist() == [5.0, 7.0]


def test_the_weight_is_limited_and_the_advantages_are_today_s():
    algorithm = PPO(gamma=1.0, gae_lambda=0.0, weight_limit=1.5)
    rollout = _two_steps([3, 3])
    batch = algorithm.prepare_batch(Coin(0.8, worth=5.0), rollout, stale_steps(rollout, 4), compiled=True)
    assert batch["weight"].tolist() == pytest.approx([1.5, 0.4])  # min(1.6, 1.5), .2 / .5
    assert batch["advantage"].tolist() == [1.0, 3.0]  # 1 + 5 - 5, 1 + 7 - 5
    assert batch["log_prob"].exp().tolist() == pytest.approx([0.8, 0.2])


def test_the_three_policy_objective_weighs_the_clipped_term():
    algorithm = PPO(normalize_advantage=False, entropy_coef=0.0, value_clip=None)
    batch = {
        "observation": torch.zeros(2, 1), "action": tensor([1, 0]), "log_prob": torch.log(tensor([0.5, 0.5])),
        "advantage": tensor([1.0, -2.0]), "weight": tensor([0.5, 2.0]), "target": torch.zeros(2),
        "value": torch.zeros(2),
    }  # fmt: skip
    losses = algorithm.losses(Coin(0.75, worth=0.0), batch, clip_range=0.2)
    # Heads: ratio 1.5, clipped to 1.2, times advantage 1 and weight .5 = .6. Tails: ratio .5, clipped to .8:
    # min(-1, -1.6) = -1.6, times weight 2 = -3.2. The loss is minus their mean: 1.3.
    assert losses.metrics["policy_loss"].item() == pytest.approx(1.3)


def _learned(correction, compiled, version=0, **settings):
    config = EnvConfig(id="CartPole-v1", num_envs=2)
    env = make_env(config)
    policy = ActorCritic(env.observation_space, env.action_space, seed=5)
    algorithm = PPO(n_epochs=2, batch_size=32, correction=correction, **settings)
    trainer = Trainer(policy, env, algorithm, seed=5, compiled=compiled)
    first = trainer.collect_rollouts(64)
    if version:
        other = trainer.collect_rollouts(64)
        trainer.learn(other)  # now the first rollout is one update old
    metrics = trainer.learn(first)
    return torch.cat([p.detach().flatten() for p in policy.parameters()]), metrics


@pytest.mark.parametrize("correction", ["decoupled", "vtrace"])
def test_on_fresh_experience_every_correction_is_ppo_bit_for_bit(correction):
    plain, _ = _learned("none", "auto")
    corrected, metrics = _learned(correction, "auto")
    assert torch.equal(plain, corrected)
    assert "behaviour_weight" not in metrics


@pytest.mark.parametrize("correction", ["decoupled", "vtrace"])
def test_on_old_experience_compiled_and_plain_agree_and_differ_from_ppo(correction):
    fast, metrics = _learned(correction, "auto", version=1)
    slow, _ = _learned(correction, "off", version=1)
    plain, _ = _learned("none", "auto", version=1)
    torch.testing.assert_close(fast, slow, rtol=2e-4, atol=2e-5)
    assert not torch.allclose(fast, plain, rtol=1e-4, atol=1e-5)
    assert metrics["staleness"] == 1.0
    assert 0.5 < metrics["behaviour_weight"] < 1.5


def test_a_subclass_with_advantages_of_its_own_is_left_to_them():
    class Mine(PPO):
        def advantages(self, rollout):
            return torch.ones_like(rollout["reward"])

    env = make_env(EnvConfig(id="CartPole-v1", num_envs=2))
    trainer = Trainer(ActorCritic(env.observation_space, env.action_space), env, Mine(batch_size=16, n_epochs=1))
    rollout = trainer.collect_rollouts(16)
    trainer.learn(rollout)
    assert trainer.learn(rollout)["advantage_std"] == 0.0


def test_staleness_0_matters_also_where_only_some_steps_are_old():
    rollout = _two_steps([4, 4])
    rollout["policy_version"] = tensor([[4], [3]])
    batch = PPO(gamma=1.0, gae_lambda=0.0).prepare_batch(
        Coin(0.8, worth=5.0), rollout, stale_steps(rollout, 4), compiled=True
    )
    assert batch["weight"][0].item() == 1.0
    assert batch["log_prob"][0].item() == pytest.approx(math.log(0.5))
