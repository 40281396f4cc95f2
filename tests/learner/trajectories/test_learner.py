"""The learner: what it lets in, what it refuses, what it remembers, and that it never touches what it is given."""

import hashlib
import json
import logging

import numpy as np
import pytest
import torch
from benchmarks.reference import documented_metrics
from safetensors.torch import load, save
from tests.learner.trajectories.toy import TablePolicy, episode, play, turn, twin

from palaestra.errors import CheckpointError, ConfigError, ExperienceError
from palaestra.experience.trajectory import Outcome
from palaestra.learner.trajectories import GRPO, RejectionSampling, TrajectoryLearner, TrajectoryPPO, UpdateConfig
from palaestra.learner.trajectories.learner import SavedState
from palaestra.learner.trajectories.proof import ProofConfig
from palaestra.learner.trajectories.replay import ReplayConfig


def learner_of(policy, algorithm, *, proof=None, replay=None, seed=0, version=0, **settings):
    config = UpdateConfig(**({"learning_rate": 0.1, "microbatch_turns": 5} | settings))
    return TrajectoryLearner(policy, algorithm, config, proof=proof, replay=replay, seed=seed, version=version)


def groups_of(policy, rng, groups=4, size=4, name="u", **more):
    """Played episodes in groups that share their start."""
    return [
        play(policy, rng, seed=int(start), name=f"{name}-{start}-{member}", group=f"{name}-{start}", **more)
        for start in range(groups)
        for member in range(size)
    ]


def fingerprint(trajectories):
    total = hashlib.sha256()
    for one in trajectories:
        for each in one.turns:
            for array in (each.prompt_ids, each.token_ids, each.log_probs, each.versions):
                total.update(array.tobytes())
            total.update(repr((each.reward, each.pictures, each.text)).encode())
        total.update(repr((one.group, one.outcome, one.episode_id, sorted(one.pictures))).encode())
    return total.hexdigest()


def weights(policy):
    return {name: tensor.clone() for name, tensor in policy.state_dict().items()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "algorithm", [RejectionSampling(), GRPO(group_size=4), TrajectoryPPO()], ids=lambda a: type(a).__name__
)
def test_an_update_raises_the_version_moves_the_weights_and_leaves_its_input_alone(algorithm):
    policy = TablePolicy()
    before, made = weights(policy), groups_of(policy, np.random.default_rng(1), groups=8, length=1)
    seen = fingerprint(made)
    learner = learner_of(policy, algorithm, epochs=2, minibatches=2)
    metrics = learner.update(made)
    assert learner.version == 1
    assert not same(before, weights(policy))
    assert fingerprint(made) == seen
    assert metrics["update"] == metrics["policy_version"] == 1.0
    assert metrics["trajectories_offered"] == 32.0
    assert 0 < metrics["trajectories_learned"] <= 32
    assert set(metrics) <= set(documented_metrics())


def test_every_metric_of_every_algorithm_is_explained():
    policy, rng = TablePolicy(), np.random.default_rng(1)
    for algorithm in (
        RejectionSampling(), GRPO(group_size=4, kl_coef=0.1, entropy_coef=0.1), TrajectoryPPO(entropy_coef=0.1),
    ):  # fmt: skip
        metrics = learner_of(policy, algorithm).update(groups_of(policy, rng, groups=8, length=1))
        assert set(metrics) <= set(documented_metrics())
        assert {"loss", "grad_norm", "learning_rate", "entropy", "tokens_per_second"} <= set(metrics)


def test_nothing_worth_learning_from_changes_nothing_and_says_so():
    policy = TablePolicy()
    before = weights(policy)
    for algorithm in (RejectionSampling(reward_threshold=9.0), GRPO(group_size=2)):
        learner = learner_of(policy, algorithm)
        pairs = [episode(turn(log_probs=[-2.0, -2.0]), name=name, group="g") for name in "ab"]
        metrics = learner.update(pairs)
        assert metrics["trajectories_learned"] == metrics["tokens_learned"] == 0.0
        assert metrics["accepted_share"] == 0.0
        assert (learner.version, learner.n_updates) == (0, 0)
        assert same(before, weights(policy))
        assert learner_of(policy, algorithm).update([])["trajectories_learned"] == 0.0


def test_groups_without_contrast_are_counted_and_dropped():
    policy, grpo = TablePolicy(), GRPO(group_size=2)
    learner = learner_of(policy, grpo, proof=ProofConfig(mean_disagreement=9, max_disagreement=99))
    alike = [episode(turn(), name=name, group="alike") for name in "ab"]
    mixed = [episode(turn(reward=reward), name=f"m{reward}", group="mixed") for reward in (0.0, 1.0)]
    short = [
        episode(turn(), name="x", group="short"),
        episode(name="y", group="short", outcome=Outcome.ENVIRONMENT_FAILED),
    ]
    assert learner.admit(alike) == []
    assert learner.admit(short) == []
    kept = learner.admit(mixed)
    assert [one.episode_id for one in kept] == ["m0.0", "m1.0"]
    metrics = learner.update(kept)
    assert metrics["zero_variance_share"] == pytest.approx(1 / 3)
    assert metrics["short_group_share"] == pytest.approx(1 / 3)
    assert metrics["refused_environment"] == 1.0
    assert metrics["trajectories_offered"] == 6.0
    assert metrics["accepted_share"] == pytest.approx(2 / 6)
    assert learner.update([])["trajectories_offered"] == 0.0


def test_what_was_admitted_is_not_weighed_again():
    policy = TablePolicy()
    learner = learner_of(policy, GRPO(group_size=4))
    rng, kept = np.random.default_rng(0), []
    for start in range(6):
        kept += learner.admit(groups_of(policy, rng, groups=1, name=str(start), length=1))
    metrics = learner.update(kept)
    assert metrics["trajectories_offered"] == 24.0
    assert metrics["trajectories_learned"] == len(kept)


def test_unproven_trajectories_are_refused_by_reason_and_the_rest_is_learned_from(caplog):
    policy = TablePolicy()
    rng = np.random.default_rng(0)
    good = [play(policy, rng, seed=seed, name=str(seed)) for seed in range(4)]
    bad = [
        episode(turn(version=5), name="future"), episode(turn(log_probs=[1.0, -1.0]), name="sure"),
        episode(turn(), name="blind", pictures={}), episode(outcome=Outcome.ENVIRONMENT_FAILED, name="broke"),
    ]  # fmt: skip
    with caplog.at_level(logging.WARNING):
        metrics = learner_of(policy, TrajectoryPPO()).update(good + bad)
    assert metrics["trajectories_refused"] == 4.0
    assert [metrics[f"refused_{reason}"] for reason in ("version", "log_prob", "picture", "environment")] == [1.0] * 4
    assert metrics["trajectories_learned"] == 4.0
    assert "episode future is not learned from: turn 0: tokens of versions 5 to 5" in caplog.text
    assert "broke" not in caplog.text


def test_a_sampler_that_never_got_the_new_weights_is_found_out_and_the_third_refusal_ends_the_training():
    policy = TablePolicy()
    stuck, rng = twin(policy), np.random.default_rng(0)
    with torch.no_grad():
        policy.table += torch.randn(12, 12, generator=torch.Generator().manual_seed(0))
    learner, before = learner_of(policy, TrajectoryPPO()), weights(policy)

    def batch():
        return [play(stuck, rng, seed=seed, name=str(seed)) for seed in range(8)]

    for count in (1, 2):
        metrics = learner.update(batch())
        assert metrics["batches_refused"] == count
        assert metrics["trajectories_learned"] == 0.0
        assert metrics["disagreement"] > 0.3
        assert "did not reach the sampler" in learner.last_refusal
    with pytest.raises(ExperienceError, match=r"3 batches in a row were refused at version 0"):
        learner.update(batch())
    assert same(before, weights(policy))
    assert learner.version == 0


def test_a_batch_that_agrees_starts_the_count_of_refusals_anew():
    policy = TablePolicy()
    stuck, rng = TablePolicy(seed=9, scale=2.0), np.random.default_rng(0)
    learner = learner_of(policy, TrajectoryPPO())
    for actor, count in ((stuck, 1), (stuck, 2), (policy, 0), (stuck, 1)):
        made = [play(actor, rng, seed=seed, name=str(seed), version=learner.version) for seed in range(8)]
        assert learner.update(made)["batches_refused"] == count
    assert learner.version == 1


def test_batches_of_which_every_episode_is_refused_end_the_training_with_the_reason():
    policy = TablePolicy()
    learner = learner_of(policy, TrajectoryPPO())
    forged = [episode(turn(reward=1e9), name="forged"), episode(outcome=Outcome.ENVIRONMENT_FAILED, name="broke")]
    assert [learner.update(forged)["batches_refused"] for _ in range(2)] == [1.0, 2.0]
    with pytest.raises(
        ExperienceError, match=r"3 batches in a row.*all 1 episodes.*forged: turn 0: the return is 1e\+09"
    ):
        learner.update(forged)
    # Screens that break are no forgery, however many there are.
    again = learner_of(policy, TrajectoryPPO())
    assert [again.update(forged[1:])["batches_refused"] for _ in range(4)] == [0.0] * 4


def test_old_weights_under_their_own_version_are_no_disagreement():
    policy = TablePolicy()
    old, rng = TablePolicy(seed=9, scale=1.0), np.random.default_rng(0)
    metrics = learner_of(policy, TrajectoryPPO(weight_limit=1.5), version=4).update(
        [play(old, rng, seed=seed, name=str(seed), version=1) for seed in range(8)]
    )
    assert metrics["trajectories_learned"] == 8.0
    assert (metrics["staleness"], metrics["staleness_max"], metrics["disagreement"]) == (3.0, 3.0, 0.0)
    assert metrics["behaviour_weight_max"] == 1.5
    assert 0 < metrics["behaviour_weight_capped"] < 1
    assert metrics["behaviour_weight"] < 1.5
    assert metrics["behaviour_kl"] > 0.05


@pytest.mark.parametrize(
    "algorithm", [RejectionSampling(), GRPO(group_size=4), TrajectoryPPO()], ids=lambda a: type(a).__name__
)
def test_a_single_step_compares_and_weighs_in_passing_and_learns_the_very_same(algorithm):
    old, found = TablePolicy(seed=9), []
    for exact in (False, True):
        policy, rng = TablePolicy(), np.random.default_rng(3)
        policy.version, policy.exact_gradients = 2, exact
        made = groups_of(policy, rng, groups=4, length=2) + groups_of(old, rng, groups=4, name="old", version=1)
        metrics = learner_of(policy, algorithm, version=2).update(made)
        assert metrics["disagreement_max"] < 1e-5
        looked = sum(count for count, grad in policy.calls if not grad)
        shared = {name: metrics.get(name) for name in ("loss", "behaviour_weight", "behaviour_weight_max", "staleness")}
        found.append((weights(policy), shared, metrics["unchecked_share"], looked))
    before, passing = found
    assert same(before[0], passing[0])
    assert before[1:3] == passing[1:3]
    if not algorithm.needs_values:
        assert passing[3] <= 16
    if isinstance(algorithm, GRPO):
        assert before[3] > 16


def test_a_group_of_failures_learns_from_a_stored_success_when_asked_to():
    policy = TablePolicy()
    lenient = ProofConfig(mean_disagreement=9, max_disagreement=99)
    learner = learner_of(policy, GRPO(group_size=2), proof=lenient, replay=ReplayConfig(fill_groups=True))
    learner.update([episode(turn(reward=reward), name=f"m{reward}", group="mixed") for reward in (0.0, 1.0)])
    failures = [episode(turn(version=1), name=name, group="failed") for name in "ab"]
    metrics = learner.update(failures)
    assert metrics["replay_share"] == 0.5
    assert metrics["zero_variance_share"] == 0.0
    assert metrics["staleness_max"] == 1.0
    assert metrics["trajectories_learned"] == 2.0
    assert learner.version == 2


def test_imitation_mixes_in_the_configured_share_of_stored_successes():
    policy = TablePolicy()
    lenient = ProofConfig(mean_disagreement=9, max_disagreement=99)
    learner = learner_of(policy, RejectionSampling(), proof=lenient, replay=ReplayConfig(share=0.25))
    for round_ in range(2):
        made = [episode(turn(reward=1.0), name=f"{round_}-{seed}", seed=10 * round_ + seed) for seed in range(6)]
        metrics = learner.update(made)
        assert metrics["replay_share"] == (0.0, 0.25)[round_]
    assert metrics["trajectories_learned"] == 8.0


def continued(policy, learner, rng, updates):
    for number in range(updates):
        name = f"{learner.n_updates}-{number}"
        learner.update(groups_of(policy, rng, groups=6, size=4, name=name, length=2, version=learner.version))
    return weights(policy)


@pytest.mark.parametrize(
    "algorithm", [RejectionSampling(), GRPO(group_size=4), TrajectoryPPO()], ids=lambda a: type(a).__name__
)
def test_a_trainer_that_loads_a_state_continues_bit_for_bit(algorithm):
    replay = ReplayConfig(fill_groups=True, share=0.25)
    settings = {"epochs": 2, "minibatches": 3, "warmup_updates": 5, "replay": replay}
    policy, rng = TablePolicy(), np.random.default_rng(0)
    learner = learner_of(policy, algorithm, **settings)
    continued(policy, learner, rng, 3)
    tensors, facts = learner.state()
    stored, said, kept = save(tensors), json.dumps(facts), rng.bit_generator.state
    copy = twin(policy)
    whole = continued(policy, learner, rng, 3)

    other_rng = np.random.default_rng(99)
    other_rng.bit_generator.state = kept
    other = learner_of(copy, algorithm, seed=5, **settings)
    other.load_state(SavedState(load(stored), json.loads(said)))
    assert other.version == 3
    assert same(whole, continued(copy, other, other_rng, 3))
    assert other.n_updates == learner.n_updates


def test_a_state_of_another_policy_is_refused():
    policy = TablePolicy()
    state = learner_of(policy, GRPO()).state()
    other = TablePolicy()
    other.worth = torch.nn.Linear(3, 1)
    with pytest.raises(CheckpointError, match="other shapes"):
        learner_of(other, GRPO()).load_state(state)


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("algorithm", [RejectionSampling(), TrajectoryPPO()], ids=lambda a: type(a).__name__)
def test_an_update_that_is_interrupted_changes_nothing_and_can_be_made_again(algorithm, at):
    replay, found = ReplayConfig(share=0.25), []
    for interrupted in (False, True):
        policy, rng, polled = TablePolicy(), np.random.default_rng(0), []
        learner = learner_of(policy, algorithm, epochs=2, minibatches=2, replay=replay)
        continued(policy, learner, rng, 2)
        played = groups_of(policy, rng, groups=6, name="last", version=2)
        batch = learner.admit(played)

        def poll(polled=polled):
            polled.append(1)
            if len(polled) == at:
                raise Interrupted

        if interrupted:
            before, optimiser = weights(policy), save(learner._updater.tensors())
            with pytest.raises(Interrupted):
                learner.update(batch, poll=poll)
            assert same(before, weights(policy))
            assert save(learner._updater.tensors()) == optimiser
            assert (learner.version, learner.n_updates) == (2, 2)
        metrics = learner.update(batch)
        assert metrics["trajectories_offered"] == 24.0
        found.append(weights(policy))
    assert same(*found)


def test_poll_is_called_before_each_minibatch():
    policy, polled = TablePolicy(), []
    learner = learner_of(policy, TrajectoryPPO(), epochs=3, minibatches=2)
    learner.update(groups_of(policy, np.random.default_rng(0)), poll=lambda: polled.append(1))
    assert len(polled) == 6


class Recalling(TablePolicy):
    """Can score with earlier weights."""

    def past_log_probs(self, turns, learned):
        with torch.no_grad():
            return self._scored(learned["table"], turns)[0]


def test_stale_tokens_are_held_against_the_weights_of_the_versions_that_are_kept(monkeypatch, caplog):
    for kept, unchecked in ((0, 1.0), (1, 1.0), (2, 0.0)):
        policy, rng = Recalling(), np.random.default_rng(0)
        made = groups_of(policy, rng, name="first")
        config = UpdateConfig(learning_rate=0.1)
        learner = TrajectoryLearner(policy, TrajectoryPPO(), config, kept_versions=kept)
        continued(policy, learner, rng, 2)
        metrics = learner.update(made)
        assert (metrics["staleness"], metrics["unchecked_share"]) == (2.0, unchecked)
    monkeypatch.setattr("palaestra.learner.trajectories.learner.KEPT_BYTES", 3 * 157 * 4)
    TrajectoryLearner(policy, TrajectoryPPO(), config, kept_versions=2)
    assert "of 2 earlier versions" not in caplog.text
    TrajectoryLearner(policy, TrajectoryPPO(), config, kept_versions=3)
    assert "the weights of 2 earlier versions are kept instead of 3" in caplog.text


def test_the_same_seed_gives_the_same_weights():
    found = []
    for _ in range(2):
        policy, rng = TablePolicy(), np.random.default_rng(0)
        found.append(continued(policy, learner_of(policy, TrajectoryPPO(), minibatches=3), rng, 2))
    assert same(*found)


def test_the_learning_rate_is_chosen_by_what_is_trained_and_said():
    policy = TablePolicy()
    assert TrajectoryLearner(policy, GRPO(), lora=True).rate.rate == 1e-5
    assert TrajectoryLearner(policy, RejectionSampling(), lora=True).rate.rate == 2e-4
    assert "full weights" in TrajectoryLearner(policy, GRPO(), lora=False).rate.reason
    with pytest.raises(ConfigError, match=r"lora=True or lora=False"):
        TrajectoryLearner(policy, GRPO())


def test_the_rate_warms_up_over_the_first_updates():
    policy, rng = TablePolicy(), np.random.default_rng(0)
    learner = learner_of(policy, TrajectoryPPO(), warmup_updates=4)
    rates = [
        learner.update([play(policy, rng, seed=s, name=str(s), version=learner.version) for s in range(4)])[
            "learning_rate"
        ]
        for _ in range(5)
    ]
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
