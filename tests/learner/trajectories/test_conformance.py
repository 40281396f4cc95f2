"""The kits find policies and algorithms that keep their promises, and each of the ways to break one."""

import itertools

import numpy as np
import pytest
import torch
from tests.learner.trajectories.toy import TablePolicy, play

from palaestra.experience.turn_scoring import TokenLogProbs, turn_inputs
from palaestra.learner.trajectories import GRPO, Loss, RejectionSampling, TrajectoryPPO
from palaestra.learner.trajectories.conformance import check_trajectory_algorithm, check_trajectory_policy


def turns_of(policy):
    rng = np.random.default_rng(4)
    found = [each for seed in range(6) for each in turn_inputs(play(policy, rng, seed=seed))]
    assert len({len(each.turn.token_ids) for each in found}) > 1
    return found


def test_the_toy_policy_keeps_its_promises():
    policy = TablePolicy()
    check_trajectory_policy(policy, turns_of(policy))


def changed(**how):
    class Changed(TablePolicy):
        def log_probs(self, turns, **asked):
            found = super().log_probs(turns, **asked)
            parts = {name: getattr(found, name) for name in ("log_probs", "mask", "entropy", "values")}
            return TokenLogProbs(
                **{name: how.get(name, lambda x, turns: x)(part, turns) for name, part in parts.items()}
            )

    return Changed


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (changed(log_probs=lambda x, turns: x - 0.01 * len(turns)), "must be 0 where padded"),
        (changed(log_probs=lambda x, turns: x * (1 + 0.1 * len(turns))), "padding leaks"),
        (changed(mask=lambda x, turns: x | True), "more in the mask"),
        (changed(log_probs=lambda x, turns: x[:, :1]), "has shape"),
        (changed(log_probs=lambda x, turns: x.detach()), "must record a graph"),
        (changed(entropy=lambda x, turns: None), "returned no entropy"),
        (changed(values=lambda x, turns: None if x is None else x[:, None]), "values has shape"),
    ],
)
def test_a_broken_promise_is_named(kind, rule):
    with pytest.raises(AssertionError, match=rule):
        check_trajectory_policy(kind(), turns_of(TablePolicy()))


def test_a_sampler_with_other_weights_is_noticed():
    policy, other = TablePolicy(), TablePolicy()
    with torch.no_grad():
        other.table[:, 0] += 0.5
    with pytest.raises(AssertionError, match="log-probabilities that differ by"):
        check_trajectory_policy(policy, turns_of(other))
    check_trajectory_policy(policy, turns_of(other), fresh=False)


@pytest.mark.parametrize(
    "make",
    [
        RejectionSampling,
        GRPO,
        lambda: GRPO(group_size=4, scale="none", kl_coef=0.1, entropy_coef=0.1, normaliser="constant"),
        TrajectoryPPO,
        lambda: TrajectoryPPO(normalize_advantage=False, normaliser="trajectory"),
    ],
)
def test_our_algorithms_keep_the_rules(make):
    check_trajectory_algorithm(make)


class Averages(GRPO):
    def loss(self, batch, now):
        total = -(batch.advantage[:, None] * now.log_probs)[batch.mask].mean()
        return Loss(total, {})


class Averaged(GRPO):
    def loss(self, batch, now):
        loss = super().loss(batch, now)
        return Loss(loss.total, {"ratio": (now.log_probs - batch.proximal).exp().mean().detach()})


class ReadsPadding(GRPO):
    def loss(self, batch, now):
        return Loss(-(batch.token_share * now.log_probs).sum(), {})


class Scales(GRPO):
    def advantages(self, trajectories, rewards):
        for earned in rewards:
            earned /= 2
        return super().advantages(trajectories, rewards)


class Draws(GRPO):
    drawn = itertools.count()

    def advantages(self, trajectories, rewards):
        return [next(self.drawn) for _ in trajectories]


class TakesBroken(RejectionSampling):
    def select(self, group, rewards):
        return group


class Infinite(RejectionSampling):
    def advantages(self, trajectories, rewards):
        return [float("inf")] * len(trajectories)


@pytest.mark.parametrize(
    ("algorithm", "rule"),
    [
        (Averages, "must add up to the loss of the whole"),
        (Averaged, "metric ratio"),
        (ReadsPadding, "a padded position has a gradient"),
        (Scales, "changed the rewards|the same for the same episodes"),
        (Draws, "the same for the same episodes"),
        (TakesBroken, "with an environment failure"),
        (Infinite, "is not finite"),
        (lambda: RejectionSampling(reward_threshold=9.0), "keeps nothing"),
    ],
)
def test_a_rule_that_an_algorithm_breaks_is_named(algorithm, rule):
    with pytest.raises(AssertionError, match=rule):
        check_trajectory_algorithm(algorithm)
