"""What cannot prove where it came from is refused, with a reason that is counted."""

import math

import pytest
from tests.learner.trajectories.toy import SHA, episode, turn

from palaestra.experience.trajectory import Outcome
from palaestra.learner.trajectories.proof import Expected, ProofConfig, find_proof_failure
from palaestra.learner.trajectories.scoring import Disagreement, describe_disagreement


def test_an_episode_with_everything_proven_is_accepted():
    assert find_proof_failure(episode(turn(version=3), turn(version=4)), Expected(version=4)) is None


def test_a_log_probability_may_be_above_zero_by_rounding():
    assert find_proof_failure(episode(turn(log_probs=[5e-5, -1.0])), Expected(version=0)) is None


@pytest.mark.parametrize(
    ("made", "reason", "detail"),
    [
        (episode(outcome=Outcome.ENVIRONMENT_FAILED, reason="page crashed"), "environment", "page crashed"),
        (episode(turns=()), "empty", "no turns"),
        (episode(turn(tokens=())), "empty", "turn 0: no prompt or no sampled token"),
        (episode(turn(), turn(prompt_ids=[])), "empty", "turn 1: no prompt"),
        (episode(turn(version=-1)), "version", "versions -1 to -1"),
        (episode(turn(versions=[2, 3])), "version", "versions 2 to 3, but there are only versions 0 to 2"),
        (episode(turn(log_probs=[math.nan, -1.0])), "log_prob", "not finite or above 0"),
        (episode(turn(log_probs=[-math.inf, -1.0])), "log_prob", "not finite or above 0"),
        (episode(turn(log_probs=[0.01, -1.0])), "log_prob", "not finite or above 0"),
        (episode(turn(pictures=(), image_sizes=())), "picture", "names no picture"),
        (episode(turn(image_sizes=((0, 32),))), "picture", "the size of a picture in the prompt is unknown"),
        (episode(turn(), pictures={}), "picture", f"picture {SHA[:12]} is missing"),
        (episode(turn(), pictures={SHA: b"another screen"}), "picture", "not what was recorded"),
        (episode(turn(reward=math.nan), outcome=Outcome.FAILURE), "reward", "its reward is nan"),
    ],
)
def test_what_is_not_proven_is_refused_with_a_reason(made, reason, detail):
    found = find_proof_failure(made, Expected(version=2))
    assert found.reason == reason
    assert detail in found.detail


def test_sampler_and_learner_may_differ_by_rounding_and_not_by_weights():
    bounds = ProofConfig(mean_disagreement=0.05, max_disagreement=1.0).bounds(half_precision=True)
    assert describe_disagreement(Disagreement(0.05, 1.0, 10), bounds) is None
    assert describe_disagreement(Disagreement(9.0, 9.0, 0), bounds) is None
    said = describe_disagreement(Disagreement(0.06, 0.5, 10), bounds)
    assert "0.06 on average (allowed 0.05)" in said
    assert "did not reach the sampler" in said
    assert "different pictures" in said
    assert "at most by 1.5" in describe_disagreement(Disagreement(0.01, 1.5, 10), bounds)
