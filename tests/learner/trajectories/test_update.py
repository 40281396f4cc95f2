"""An update: the same gradient however it is cut, and no step on a number that is none."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.learner.trajectories.toy import TablePolicy, paid, play, twin

from palaestra.errors import CheckpointError, ConfigError, NonFiniteError
from palaestra.experience.turn_scoring import TokenLogProbs
from palaestra.learner.trajectories import GRPO, RejectionSampling, TrajectoryPPO, UpdateConfig
from palaestra.learner.trajectories.scoring import ScoredBatch, build_token_batch
from palaestra.learner.trajectories.update import TokenUpdater

ALGORITHMS = [
    RejectionSampling(reward_threshold=-1.0),
    GRPO(kl_coef=0.1, entropy_coef=0.05, normaliser="trajectory"),
    GRPO(normaliser="constant", normaliser_tokens=7.0),
    TrajectoryPPO(entropy_coef=0.01),
]


def prepared(algorithm, seed=0):
    """A policy two updates ahead of half of its samples, and those samples."""
    old, policy = TablePolicy(seed, scale=1.0), TablePolicy(seed, scale=1.0)
    with torch.no_grad():
        policy.table += 0.1 * torch.randn(12, 12, generator=torch.Generator().manual_seed(seed))
        policy.worth.weight += 0.1
    rng = np.random.default_rng(seed)
    made = [
        play(who, rng, seed=number // 2, name=str(number), group=str(number // 2), length=1 + number % 3, version=age)
        for number, (who, age) in enumerate([(old, 0), (policy, 2)] * 4)
    ]
    # One of each pair earns something, whatever it said.
    made = [
        replace(one, turns=(*one.turns[:-1], replace(one.turns[-1], reward=float(number % 2))))
        for number, one in enumerate(made)
    ]
    batch = ScoredBatch(policy, algorithm, made, version=2, microbatch=4)
    values = None
    if algorithm.needs_values:
        found = iter(batch.rows)
        values = [np.array([next(found).value for _ in one.turns]) for one in made]
    return policy, algorithm.samples(made, paid(made), values=values), batch


def gradient(policy, algorithm, samples, batch, parts):
    """Of the objective, added up over the given parts of the samples."""
    tokens = sum(len(batch.turns[sample.turn].turn.token_ids) for sample in samples)
    policy.zero_grad()
    for part in parts:
        some = [samples[index] for index in part]
        asked = [batch.turns[sample.turn] for sample in some]
        now = policy.log_probs(asked, with_values=algorithm.needs_values, with_entropy=algorithm.needs_entropy)
        shares = {"token_share": 1 / tokens, "turn_share": 1 / len(samples)}
        part = build_token_batch(some, batch.rows, **shares, device=torch.device("cpu"))
        algorithm.loss(part, now).total.backward()
    grads = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    return torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: type(one).__name__)
def test_the_gradients_of_the_microbatches_add_up_to_the_gradient_of_the_whole(algorithm):
    policy, samples, batch = prepared(algorithm)
    order = np.random.default_rng(1).permutation(len(samples))
    whole = gradient(policy, algorithm, samples, batch, [order])
    assert whole.norm() > 1e-3
    for pieces in (2, 5, len(samples)):
        cut = gradient(policy, algorithm, samples, batch, np.array_split(order, pieces))
        assert torch.allclose(cut, whole, atol=1e-6)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda one: type(one).__name__)
def test_the_size_of_a_microbatch_changes_neither_weights_nor_what_is_reported(algorithm):
    policy, samples, batch = prepared(algorithm)
    said, weights = [], []
    for size in (1, 4, 100):
        own = twin(policy)
        # A large epsilon keeps Adam linear in the gradient, so that rounding is not blown up to full steps.
        config = UpdateConfig(microbatch_turns=size, epochs=2, minibatches=2, adam_eps=1.0)
        updater = TokenUpdater(own, algorithm, config, rate=0.1)
        said.append(updater.run(samples, batch, np.random.default_rng(5)))
        weights.append(own.table.detach())
    assert said[0]["minibatches"] == 4.0
    for other in (1, 2):
        assert torch.allclose(weights[0], weights[other], atol=1e-6)
        assert said[other] == pytest.approx(said[0], abs=1e-5)
    assert not torch.allclose(weights[0], policy.table, atol=1e-4)


class Breaking(TablePolicy):
    """Says something that is no number at its n-th answer with gradients."""

    healthy = 10**6

    def log_probs(self, turns, *, grad=True, **more):
        found = super().log_probs(turns, grad=grad, **more)
        if grad:
            self.healthy -= 1
        if self.healthy >= 0:
            return found
        return TokenLogProbs(self.poisoned(found.log_probs), found.mask, found.entropy, found.values)


class _NoSlope(torch.autograd.Function):
    """The same going forward, no number going back."""

    @staticmethod
    def forward(ctx, numbers):
        return numbers.clone()

    @staticmethod
    def backward(ctx, slope):
        return slope * math.nan


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize(("epochs", "minibatches", "healthy"), [(1, 1, 0), (1, 2, 1), (3, 2, 4)])
def test_a_number_that_is_none_leaves_weights_and_optimiser_as_they_were(where, epochs, minibatches, healthy):
    algorithm = GRPO()
    source, samples, batch = prepared(algorithm)
    policy = Breaking(scale=1.0)
    policy.load_state_dict(source.state_dict())
    config = UpdateConfig(microbatch_turns=100, epochs=epochs, minibatches=minibatches)
    updater = TokenUpdater(policy, algorithm, config, rate=0.1)
    updater.run(samples, batch, np.random.default_rng(0))
    weights = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    moments = {name: tensor.clone() for name, tensor in updater.tensors().items()}

    policy.healthy = healthy
    policy.poisoned = _NoSlope.apply if where == "gradient" else lambda numbers: numbers * math.nan
    with pytest.raises(NonFiniteError, match="as they were before this batch"):
        updater.run(samples, batch, np.random.default_rng(0))

    assert all(torch.equal(weights[name], tensor) for name, tensor in policy.state_dict().items())
    assert moments.keys() == updater.tensors().keys()
    assert all(torch.equal(moments[name], tensor) for name, tensor in updater.tensors().items())


def test_moments_of_other_parameters_are_refused():
    config = UpdateConfig()
    policy, samples, batch = prepared(GRPO())
    updater = TokenUpdater(policy, GRPO(), config, rate=0.1)
    updater.run(samples, batch, np.random.default_rng(0))
    tensors = updater.tensors()
    assert set(tensors) == {"adamw.0.step", "adamw.0.exp_avg", "adamw.0.exp_avg_sq"}
    with pytest.raises(CheckpointError, match=r"does not fit this policy, whose parameter has \(12, 12\)"):
        updater.restore({"adamw.0.exp_avg": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="parameter has none"):
        updater.restore({"adamw.9.exp_avg": torch.zeros(3)})


class WithHead(TablePolicy):
    def value_parameters(self):
        return self.worth.parameters()


def test_a_separate_value_head_learns_at_its_own_rate_and_both_warm_up():
    policy, samples, batch = prepared(TrajectoryPPO())
    apart = WithHead(scale=1.0)
    apart.load_state_dict(policy.state_dict())
    config = UpdateConfig(value_learning_rate=0.5, max_grad_norm=None)
    updater = TokenUpdater(apart, TrajectoryPPO(), config, rate=0.01)
    updater.set_rate_factor(0.5)
    updater.run(samples, batch, np.random.default_rng(0))
    # Adam's first step is the rate, in each coordinate that has a gradient.
    assert (apart.worth.bias - policy.worth.bias).abs().max().item() == pytest.approx(0.25, rel=1e-3)
    assert (apart.table - policy.table).abs().max().item() == pytest.approx(0.005, rel=1e-3)


def test_a_policy_with_nothing_to_train_is_refused():
    policy = TablePolicy()
    policy.trainable_parameters = lambda: []
    with pytest.raises(ConfigError, match="has nothing to train"):
        TokenUpdater(policy, GRPO(), UpdateConfig(), rate=0.1)
