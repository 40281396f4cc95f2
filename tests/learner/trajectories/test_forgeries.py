"""Nothing forged is learned from: each forgery is built from episodes that the model really played, and is refused.

Everything here goes the honest way, from screens without a browser through sampler, codec and task runner to the
trainer; only then is one thing changed.
"""

import hashlib
import logging
from dataclasses import replace

import numpy as np
import pytest
from tests.learner.trajectories.played import SIZE, build_policy, play_groups

from palaestra.experience.trajectory import Outcome
from palaestra.learner.trajectories import GRPO, TrajectoryLearner, UpdateConfig
from palaestra.learner.trajectories.proof import ProofConfig
from palaestra.sessions.fake import SCREEN, encode_png

WHITE = encode_png(SCREEN, [b"\xff\xff\xff" * SCREEN.width] * SCREEN.height)
"""Another picture of the size of the screen."""


@pytest.fixture(scope="module")
def played():
    """Two groups of one start each, by version 0."""
    return play_groups(build_policy(), (0, 2))


def learner_of(**settings):
    config = UpdateConfig(learning_rate=1e-3, microbatch_turns=SIZE, **settings)
    return TrajectoryLearner(build_policy(), GRPO(group_size=SIZE), config, temperature=1.0)


@pytest.fixture(scope="module")
def fresh():
    """A learner at version 0."""
    return learner_of()


@pytest.fixture(scope="module")
def ahead(played):
    """A learner that has learned from the second group: tokens of the first are stale now, and so are its weights."""
    learner = learner_of()
    assert learner.update(played[1])["trajectories_learned"] == SIZE
    return learner


def turns(change):
    """A forgery of every turn of every episode."""
    return lambda group: [replace(one, turns=tuple(change(turn) for turn in one.turns)) for one in group]


def each(**facts):
    """A forgery of every episode."""
    return lambda group: [replace(one, **facts) for one in group]


def paid(reward):
    """A forgery of what the last turn was paid, by the episode."""
    return lambda group: [
        replace(one, turns=(*one.turns[:-1], replace(one.turns[-1], reward=reward(one)))) for one in group
    ]


def last_of(forge):
    """The forgery of one episode among honest ones."""
    return lambda group: [*group[:-1], *forge(group[-1:])]


def another_picture(turn):
    return replace(turn, pictures=(hashlib.sha256(WHITE).hexdigest(),))


def pictures_replaced(group):
    pictures = {hashlib.sha256(WHITE).hexdigest(): WHITE}
    return [replace(one, pictures=pictures) for one in turns(another_picture)(group)]


def one_log_prob_off(turn):
    changed = turn.log_probs.copy()
    changed[len(changed) // 2] -= 2.5
    return replace(turn, log_probs=changed)


def noisy(turn):
    rng = np.random.default_rng(0)
    return replace(turn, log_probs=np.minimum(0, turn.log_probs + rng.normal(0, 0.3, len(turn.log_probs))))


def first_token(number):
    return lambda turn: replace(turn, token_ids=[number, *turn.token_ids[1:]])


def each_task(**facts):
    """A forgery of the task of every episode."""
    return lambda group: [replace(one, task={**one.task, **facts}) for one in group]


def success_at_minus_one(group):
    task = {**group[0].task, "reward_range": [-1.0, 1.0]}
    return paid(lambda one: -1.0)(each(outcome=Outcome.SUCCESS, task=task)(group))


def of_another_start(group):
    """Its own screens and tokens, under the group's name."""
    stranger = play_groups(build_policy(), (5,))[0][0]
    return [*group[:-1], replace(stranger, group=group[0].group)]


def of_another_start_relabelled(group):
    stranger = play_groups(build_policy(), (5,))[0][0]
    return [*group[:-1], replace(stranger, group=group[0].group, task=group[0].task)]


def cloned(group):
    return [*group[:-1], replace(group[0], episode_id="another", outcome=group[0].outcome)]


def cloned_under_another_session(group):
    return [*group[:-1], replace(group[0], episode_id="another", session_id="another")]


FORGERIES = {
    "inverted rewards": (paid(lambda one: 1.0 - one.total_reward()), "ended as a success with a return of 0"),
    "negated rewards": (paid(lambda one: -1.0 if one.success else -0.5), "the range of the task is 0 to 1"),
    "a reward of 1e9": (paid(lambda one: 1e9), "the return is 1e+09, and the range of the task is 0 to 1"),
    "a success paid -1": (success_at_minus_one, "ended as a success with a return of -1, and that of a success is 1"),
    "a failure called success": (each(outcome=Outcome.SUCCESS), "ended as a success with a return of 0"),
    "a success called failure": (each(outcome=Outcome.FAILURE), "ended as failure with a return of 1, which only a"),
    "another text": (turns(lambda turn: replace(turn, text=turn.text.replace("left", "right"))), "its tokens say"),
    "another action": (turns(lambda turn: replace(turn, action={"kind": "wait", "seconds": 1.0})), "its text says"),
    "other tokens": (
        turns(lambda turn: replace(turn, token_ids=np.roll(turn.token_ids, 1))), "turn 0: its tokens say",
    ),
    "a token below 0": (turns(first_token(-1)), "turn 0: token -1 is not in the vocabulary"),
    "a token past the vocabulary": (turns(first_token(10**6)), "turn 0: token 1000000 is not in the vocabulary"),
    "a reward range of one number": (each_task(reward_range=5), "the reward range 5, which is not two numbers"),
    "a reward that is text": (paid(lambda one: "1"), "turn 0: its reward is '1'"),
    "another image size": (turns(lambda turn: replace(turn, image_sizes=((320, 208),))), "recorded at 320 x 208"),
    "another seed in the group": (of_another_start, "have another task (seed 0 and 5)"),
    "another seed, relabelled": (of_another_start_relabelled, "began on different screens"),
    "another instruction": (
        last_of(lambda group: [replace(one, task={**one.task, "instruction": "Wait."}) for one in group]),
        "have another task (instruction",
    ),
    "a clone": (cloned, "are the same one (session session-0)"),
    "a clone of another session": (cloned_under_another_session, "are the same one (start and tokens"),
    "the same episode twice": (lambda group: [*group[:-1], group[0]], "are the same one (episode id e0-0)"),
    "another temperature": (each(temperature=0.5), "sampled at temperature 0.5, and this run samples at 1"),
    "one log-probability off by 2.5": (last_of(turns(one_log_prob_off)), "at most by 2.5 in episode e0-3, turn 0"),
    "log-probabilities with noise": (last_of(turns(noisy)), "in episode e0-3 (allowed 0.008)"),
    "other pictures": (pictures_replaced, "sampler and learner disagree"),
    "pictures under a wrong name": (
        lambda group: [replace(one, pictures=dict.fromkeys(one.pictures, WHITE)) for one in group],
        "is not what was recorded under that SHA-256",
    ),
    "other weights": (turns(lambda turn: replace(turn, weights="0" * 64)), "it was sampled by weights 000000000000"),
    "no weights": (turns(lambda turn: replace(turn, weights="")), "does not name the weights that sampled it"),
}  # fmt: skip


@pytest.mark.parametrize("stale", [False, True], ids=["fresh", "stale"])
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forgery_is_refused_and_named(played, fresh, ahead, caplog, forgery, stale):
    learner = ahead if stale else fresh
    version, weights = learner.version, learner.policy.fingerprint
    forge, message = FORGERIES[forgery]
    with caplog.at_level(logging.WARNING):
        metrics = learner.update(forge(list(played[0])))
    learner._refused_in_a_row = 0
    assert metrics["trajectories_learned"] == 0
    assert metrics["trajectories_refused"] + metrics["batches_refused"] > 0
    assert message in caplog.text
    assert (learner.version, learner.policy.fingerprint) == (version, weights)


def test_a_stale_episode_cannot_be_passed_off_as_a_fresh_one(played, ahead, caplog):
    forged = turns(lambda turn: replace(turn, versions=turn.versions + 1))(played[0])
    assert ahead.update(forged)["refused_weights"] == SIZE
    assert "and version 1 was published as" in caplog.text
    relabelled = turns(lambda turn: replace(turn, weights=ahead.policy.fingerprint))(forged)
    assert ahead.update(relabelled)["batches_refused"] == 2
    assert ahead.version == 1
    ahead._refused_in_a_row = 0


@pytest.mark.parametrize("settings", [{}, {"epochs": 2, "minibatches": 2}], ids=["one step", "four steps"])
def test_what_was_really_played_is_learned_from_fresh_and_stale(played, settings):
    learner = learner_of(**settings)
    for number, group in enumerate(played):
        metrics = learner.update(group)
        assert metrics["trajectories_learned"] == SIZE, learner.last_refusal
        assert metrics["disagreement_max"] < 1e-4
        assert metrics["unchecked_share"] == 0.0
        assert metrics["staleness"] == number
        assert learner.version == number + 1


@pytest.mark.parametrize("forge", [turns(one_log_prob_off), pictures_replaced])
def test_a_forgery_of_any_single_episode_is_found_when_several_steps_are_taken(played, forge):
    learner = learner_of(epochs=2, minibatches=2)
    metrics = learner.update([*played[1], *last_of(forge)(list(played[0]))])
    # The group whose screens differ is refused by itself; a log-probability speaks against the whole batch.
    assert metrics["trajectories_learned"] in (0, SIZE)
    assert metrics["refused_group"] + metrics["batches_refused"] > 0
    assert learner.version == (1 if metrics["trajectories_learned"] else 0)


def test_tokens_of_weights_that_are_no_longer_kept_are_counted_as_unchecked(played):
    learner = learner_of()
    learner._kept.clear()
    learner.update(played[1])
    metrics = learner.update(played[0])
    assert metrics["trajectories_learned"] == SIZE
    assert metrics["unchecked_share"] == 1.0


def test_episodes_of_another_learner_are_learned_from_only_when_that_is_allowed(played):
    unnamed = turns(lambda turn: replace(turn, weights=""))
    for group in (list(played[0]), unnamed(played[0])):
        for allowed in (False, True):
            learner = learner_of()
            learner.proof = ProofConfig(foreign_weights=allowed)
            learner._version = 3
            learner._fingerprints = {3: learner.policy.fingerprint}
            metrics = learner.update(group)
            assert metrics["trajectories_learned"] == (SIZE if allowed else 0)
            assert metrics["refused_weights"] == (0 if allowed else SIZE)


def test_a_learner_that_was_resumed_still_knows_the_weights_of_earlier_versions(played, ahead):
    other = learner_of()
    other.policy.load_trainable_state(ahead.policy.trainable_state())
    other.load_state(ahead.state())
    assert len(other.admit(played[0])) == SIZE
    forged = turns(lambda turn: replace(turn, weights="0" * 64))(played[0])
    assert other.admit(forged) == []
