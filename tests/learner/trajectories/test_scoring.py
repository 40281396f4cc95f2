"""One look before learning: fresh tokens keep their record, stale ones are seen with today's eyes."""

import numpy as np
import pytest
import torch
from tests.learner.trajectories.toy import TablePolicy, episode, play, turn

from palaestra.errors import ConfigError, ExperienceError, NonFiniteError
from palaestra.learner.trajectories import GRPO, RejectionSampling, TrajectoryPPO
from palaestra.learner.trajectories.proof import ProofConfig
from palaestra.learner.trajectories.scoring import ScoredBatch


def look(policy, algorithm, episodes, checked_turns=None, microbatch=3, version=0):
    """The turns, the scored batch, and what was compared."""
    proof = ProofConfig(checked_turns=checked_turns)
    found = ScoredBatch(policy, algorithm, episodes, version=version, microbatch=microbatch, proof=proof)
    return found.turns, found, found.disagreement()


def episodes_of(policy, count=6, **more):
    rng = np.random.default_rng(0)
    return [play(policy, rng, seed=seed, name=str(seed), **more) for seed in range(count)]


def test_fresh_tokens_keep_their_recorded_log_probabilities_to_the_last_bit_and_weigh_one():
    policy = TablePolicy()
    turns, found, compared = look(policy, GRPO(), episodes_of(policy))
    for each, row in zip(turns, found.rows, strict=True):
        assert row.proximal.tolist() == each.turn.log_probs.tolist()
        assert row.importance.tolist() == [1.0] * len(each.turn.token_ids)
    assert compared.mean < 1e-6
    assert compared.tokens == sum(len(each.turn.token_ids) for each in turns)
    assert (found.staleness, found.staleness_max) == (0.0, 0.0)


def test_stale_tokens_are_seen_by_todays_policy_and_weigh_as_much_as_it_would_repeat_them():
    old, policy = TablePolicy(seed=1, scale=1.0), TablePolicy(seed=2, scale=1.0)
    turns, found, compared = look(policy, GRPO(weight_limit=1.5), episodes_of(old, version=1), version=3)
    capped = 0
    for each, row in zip(turns, found.rows, strict=True):
        today = policy.log_probs([each], grad=False).log_probs[0]
        assert row.proximal.tolist() == pytest.approx(today.tolist(), abs=1e-6)
        wanted = (today - torch.tensor(each.turn.log_probs)).exp().clamp(max=1.5)
        assert row.importance.tolist() == pytest.approx(wanted.tolist(), abs=1e-5)
        assert row.capped == int((row.importance == 1.5).sum())
        capped += row.capped
    assert capped > 0
    assert (compared.tokens, found.staleness) == (0, 2.0)
    assert found.behaviour_kl > 0.05


def test_in_a_turn_of_two_versions_only_the_older_tokens_are_looked_at_again():
    policy = TablePolicy()
    mixed = episode(turn(1, (4, 5, 6), log_probs=[-1.0, -2.0, -3.0], versions=[1, 2, 2]))
    turns, found, _ = look(policy, GRPO(), [mixed], version=2)
    row = found.rows[0]
    assert row.proximal[1:].tolist() == [-2.0, -3.0]
    assert row.importance[1:].tolist() == [1.0, 1.0]
    assert row.proximal[0].item() == pytest.approx(policy.log_probs(turns, grad=False).log_probs[0, 0].item())
    assert found.staleness == pytest.approx(1 / 3)


def test_tokens_sampled_at_half_the_temperature_are_scored_at_half_the_temperature():
    policy = TablePolicy(scale=1.0)
    _, _, compared = look(policy, GRPO(), episodes_of(policy, temperature=0.5))
    assert compared.maximum < 1e-5


def test_without_values_only_as_many_fresh_turns_are_looked_at_as_the_proof_wants():
    policy = TablePolicy()
    made = episodes_of(policy)
    for algorithm, turns in ((GRPO(), 4), (RejectionSampling(), 4), (TrajectoryPPO(), 12)):
        policy.calls.clear()
        _, found, _ = look(policy, algorithm, made, checked_turns=4, microbatch=5)
        assert sum(count for count, _ in policy.calls) == turns
        assert all(not grad for _, grad in policy.calls)
        assert all(count <= 5 for count, _ in policy.calls)
        assert (found.rows[0].value is not None) == algorithm.needs_values


def test_the_reference_is_the_policy_from_before_training():
    policy = TablePolicy()
    made = episodes_of(policy)
    with torch.no_grad():
        policy.table += 1.5 * torch.eye(12)
    turns, found, _ = look(policy, GRPO(kl_coef=0.1), made)
    for each, row in zip(turns, found.rows, strict=True):
        assert row.reference.tolist() == pytest.approx(each.turn.log_probs.tolist(), abs=1e-6)
    policy.reference_log_probs = lambda turns: None
    with pytest.raises(ConfigError, match="no weights from before training"):
        look(policy, GRPO(kl_coef=0.1), made)


def test_a_policy_that_already_speaks_nonsense_is_found_out_before_learning():
    policy = TablePolicy()
    made = episodes_of(policy)
    with torch.no_grad():
        policy.table[3] = float("nan")
    with pytest.raises(NonFiniteError, match="before anything was learned"):
        look(policy, GRPO(), made)


def test_an_algorithm_that_needs_values_says_so_when_there_are_none():
    policy = TablePolicy()
    made, scored = episodes_of(policy), policy.log_probs
    policy.log_probs = lambda turns, *, with_values, **more: scored(turns, **more)
    with pytest.raises(ExperienceError, match="needs a value head"):
        look(policy, TrajectoryPPO(), made)
