"""Imitation of demonstrations: numbers by hand, provenance, and demonstrations beside the episodes of a policy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.experience.demonstrated import write
from tests.experience.test_demonstrations import demonstration
from tests.learner.trajectories.toy import END, NUMBERS, TablePolicy, play, skill, turn

from palaestra.errors import ExperienceError
from palaestra.experience.demonstrations import DemonstrationSampler
from palaestra.experience.trajectory import NOT_SAMPLED, Source
from palaestra.experience.turn_scoring import TokenLogProbs
from palaestra.learner.trajectories import (
    GRPO,
    RejectionSampling,
    Supervised,
    TrajectoryLearner,
    TrajectoryPPO,
    UpdateConfig,
)
from palaestra.learner.trajectories.algorithm import TokenBatch
from palaestra.learner.trajectories.conformance import check_trajectory_algorithm
from palaestra.learner.trajectories.learner import DemonstrationMix
from palaestra.learner.trajectories.proof import Expected, Reason, find_demonstration_failure, find_proof_failure
from palaestra.transport.source import SavedState


class ScoredTable(TablePolicy):
    """The toy policy with the scores that supervised learning reads."""

    def log_probs(self, turns, *, with_imitation=False, **more):
        scores = super().log_probs(turns, **more)
        if not with_imitation:
            return scores
        with torch.set_grad_enabled(more.get("grad", True)):
            every = self._scored(self.table, turns)[2]
            top = (scores.log_probs >= every.max(-1).values - 1e-9) & scores.mask
            return replace(scores, is_top=top, mean_log_prob=every.mean(-1) * scores.mask)


def token_batch(log_probs):
    shape = log_probs.shape
    ones, count = torch.ones(shape), log_probs.numel()
    return TokenBatch(
        log_probs.detach(), ones, ones.bool(), ones / count, torch.ones(shape[0]), token_share=1 / count, turn_share=1.0
    )


def test_the_loss_is_the_mean_cross_entropy_with_label_smoothing_by_hand():
    log_probs = torch.tensor([[math.log(0.5), math.log(0.25)]], requires_grad=True)
    scores = TokenLogProbs(
        log_probs,
        torch.ones(1, 2, dtype=torch.bool),
        is_top=torch.tensor([[True, False]]),
        mean_log_prob=torch.tensor([[-1.0, -3.0]]),
    )
    plain = Supervised().loss(token_batch(log_probs), scores)
    assert float(plain.total.detach()) == pytest.approx(1.5 * math.log(2))  # (ln 2 + ln 4) / 2
    assert float(plain.metrics["nll"]) == pytest.approx(1.5 * math.log(2))
    assert float(plain.metrics["token_accuracy"]) == 0.5
    smooth = Supervised(label_smoothing=0.1).loss(token_batch(log_probs), scores)
    assert float(smooth.total.detach()) == pytest.approx(0.9 * 1.5 * math.log(2) + 0.1 * 2.0)
    assert float(smooth.metrics["nll"]) == pytest.approx(1.5 * math.log(2))
    with pytest.raises(ExperienceError, match="label_smoothing is above 0"):
        Supervised(label_smoothing=0.1).loss(token_batch(log_probs), replace(scores, mean_log_prob=None))


def test_it_keeps_the_rules_of_an_algorithm():
    check_trajectory_algorithm(Supervised)


def test_demonstrations_teach_the_toy_game_and_metrics_say_so():
    policy = ScoredTable()
    learner = TrajectoryLearner(policy, Supervised(), UpdateConfig(learning_rate=0.3))
    batch, before = [demonstration(number) for number in range(NUMBERS)], skill(policy)
    first = learner.update(batch)
    for _ in range(20):
        last = learner.update(batch)
    assert before < 0.2
    # A row of the table has two right successors, the answer and END: neither can be more likely than one half.
    assert 0.4 < skill(policy) < 0.6
    assert math.log(2) < last["nll"] < 0.75 < 2.0 < first["nll"]
    assert first["token_accuracy"] < 0.3 < 0.4 < last["token_accuracy"]
    assert last["demonstration_turns"] == NUMBERS
    assert last["demonstration_nll"] == pytest.approx(last["nll"], rel=1e-5)
    assert "staleness" not in last
    assert "behaviour_kl" not in last
    assert last["accepted_share"] == 1.0


EXPECTED = Expected(version=3)


def test_a_demonstration_never_passes_as_a_sampled_episode():
    one = demonstration(1)
    assert find_demonstration_failure(one, EXPECTED) is None
    assert find_proof_failure(one, EXPECTED).reason is Reason.SOURCE
    # Not even with its source removed, or with foreign weights allowed.
    stripped = replace(one, source=Source.POLICY)
    for expected in (EXPECTED, replace(EXPECTED, foreign_weights=True, fingerprints={0: "w"})):
        assert find_proof_failure(stripped, expected).reason is Reason.VERSION


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"source": Source.POLICY}, "a policy sampled it"),
        ({"turns": (turn(1, (4, END), [-0.5, 0.0], NOT_SAMPLED, reward=1.0),)}, "as if a policy sampled them"),
        ({"turns": (turn(1, (4, END), [0.0, 0.0], 0, reward=1.0),)}, "as if a policy sampled them"),
        ({"turns": (turn(1, (4, END), [0.0, 0.0], NOT_SAMPLED, reward=1.0, weights="w"),)}, "as if a policy"),
        ({"turns": (turn(1, (4,), [0.0], NOT_SAMPLED, action=None, unreadable="odd"),)}, "it has no action"),
        ({"pictures": {}}, "is missing"),
        ({"turns": ()}, "it has no turns"),
    ],
)
def test_a_demonstration_that_claims_to_be_sampled_or_is_damaged_is_refused(changes, reason):
    one = replace(demonstration(1), **changes)
    assert reason in find_demonstration_failure(one, EXPECTED).detail
    with pytest.raises(ExperienceError, match="cannot be imitated"):
        TrajectoryLearner(ScoredTable(), Supervised(), lora=True).update([one])


def mixed_learner(tmp_path, algorithm, *, count=5, weight=0.5, **config):
    made = write(tmp_path / "d", [demonstration(number) for number in range(NUMBERS)])
    mix = DemonstrationMix(DemonstrationSampler(made, seed=0), count, weight)
    policy = ScoredTable()
    return policy, TrajectoryLearner(
        policy, algorithm, UpdateConfig(**{"learning_rate": 0.1} | config), demonstrations=mix, kept_versions=0
    )


def played(policy, count, rng, group=""):
    return [play(policy, rng, seed=3, name=f"e{rng.integers(1 << 40)}", group=group) for _ in range(count)]


@pytest.mark.parametrize(
    ("algorithm", "config"),
    [
        (RejectionSampling(), {}),
        (GRPO(group_size=4), {}),
        (TrajectoryPPO(), {"minibatches": 2, "epochs": 2}),
        (TrajectoryPPO(), {"microbatch_turns": 3}),
    ],
)
def test_demonstrations_beside_episodes_are_counted_apart_and_teach(tmp_path, algorithm, config):
    policy, learner = mixed_learner(tmp_path, algorithm, **config)
    rng, before = np.random.default_rng(0), skill(policy)
    for number in range(12):
        metrics = learner.update(played(policy, 4, rng, f"g{number}"))
        policy.version = learner.version
    assert metrics["demonstration_turns"] == 5.0
    assert 0 < metrics["demonstration_nll"] < math.log(12)
    assert skill(policy) > before + 0.1
    # Provenance is checked for sampled tokens only, and all of them are.
    assert metrics.get("unchecked_share", 0.0) == 0.0
    assert metrics["refused_source"] == 0.0


def test_the_auxiliary_loss_adds_the_weighted_mean_cross_entropy_by_hand(tmp_path):
    policy, learner = mixed_learner(tmp_path, GRPO(group_size=2), count=2, weight=0.25)
    table = policy.table.detach().clone()
    log_probs = torch.log_softmax(table, -1)
    drawn = DemonstrationSampler(learner.demonstrations.sampler.demonstrations, seed=0).draw(2)
    nll = 0.0
    for one in drawn:
        number, (first, end) = int(one.turns[0].prompt_ids[-1]), one.turns[0].token_ids.tolist()
        nll -= float(log_probs[number, first] + log_probs[first, end]) / 4
    metrics = learner.update([])  # no episode has a learning signal
    assert metrics["demonstration_nll"] == pytest.approx(nll, rel=1e-5)
    assert metrics["loss"] == pytest.approx(0.25 * nll, rel=1e-5)
    assert (metrics["trajectories_learned"], metrics["demonstration_turns"]) == (0.0, 2.0)
    assert learner.version == 1


@pytest.mark.parametrize("minibatches", [2, 3])
def test_the_likelihood_of_demonstrations_does_not_depend_on_how_they_are_divided(tmp_path, minibatches):
    """With a step too small to move the weights. Imitated alone, so that all turns are in every update."""
    parts = {}
    for count in (1, minibatches):
        _, learner = mixed_learner(tmp_path / str(count), GRPO(group_size=2), minibatches=count, learning_rate=1e-12)
        parts[count] = learner.update([])
        assert parts[count]["minibatches"] == count
    assert parts[1]["demonstration_turns"] == parts[minibatches]["demonstration_turns"] > 0
    assert parts[1]["demonstration_nll"] == pytest.approx(parts[minibatches]["demonstration_nll"], rel=1e-6)


def test_a_learner_continues_with_the_same_demonstrations(tmp_path):
    policy, learner = mixed_learner(tmp_path, RejectionSampling())
    learner.update([])
    tensors, facts = learner.state()
    state = SavedState({name: part.clone() for name, part in tensors.items()}, facts)
    weights = {name: part.clone() for name, part in policy.state_dict().items()}
    expected = learner.update([])
    other, again = mixed_learner(tmp_path / "other", RejectionSampling())
    other.load_state_dict(weights)
    again.load_state(state)
    result = again.update([])
    assert result["demonstration_nll"] == expected["demonstration_nll"]
    assert torch.equal(other.table, policy.table)


@pytest.mark.parametrize("algorithm", [RejectionSampling(), GRPO(group_size=2)])
def test_demonstrations_do_not_hide_that_every_episode_is_refused(tmp_path, algorithm):
    policy, learner = mixed_learner(tmp_path, algorithm)
    rng = np.random.default_rng(0)

    def update():
        forged = [replace(one, temperature=7.0) for one in played(policy, 2, rng, "g")]
        learner.temperature = 1.0
        return learner.update(forged)

    assert [update()["batches_refused"] for _ in range(2)] == [1.0, 2.0]
    with pytest.raises(ExperienceError, match=r"3 batches in a row.*temperature 7.*see docs/algorithms\.md"):
        update()


def test_a_failed_update_draws_the_same_demonstrations_again(tmp_path):
    _, learner = mixed_learner(tmp_path, RejectionSampling())
    position = learner.demonstrations.sampler.state()

    def fail():
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        learner.update([], poll=fail)
    assert learner.demonstrations.sampler.state() == position
