"""What an episode earns for learning: as paid when it was finished, and no more than a mistake when it was not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.learner.trajectories.toy import TablePolicy, episode, play, turn

from palaestra.experience.trajectory import Outcome
from palaestra.learner.trajectories import GRPO, TrajectoryLearner, UpdateConfig
from palaestra.learner.trajectories.reward import RewardConfig, episode_ending, reward_warnings, training_rewards

TASK = {"task": "toy/add", "seed": 7, "params": {}, "reward_range": [-1.0, 1.0]}


def ended(outcome, *rewards, last=None, **more):
    turns = [turn(reward=reward) for reward in rewards]
    if last is not None:
        turns[-1] = turn(reward=rewards[-1], action={"kind": last})
    return episode(*turns, outcome=outcome, task={**TASK, **more})


def earned(made, **config):
    return training_rewards(made, RewardConfig(**config)).tolist()


def test_what_was_finished_earns_what_was_paid():
    assert earned(ended(Outcome.SUCCESS, 0.25, 0.75)) == [0.25, 0.75]
    assert earned(ended(Outcome.FAILURE, 0.25, -1.25)) == [0.25, -1.25]


@pytest.mark.parametrize(
    ("made", "ending"),
    [
        (ended(Outcome.TRUNCATED, 0.0, 0.0), "truncated"),
        (ended(Outcome.FAILURE, 0.0, 0.0, last="terminate"), "terminated_early"),
        (ended(Outcome.FAILURE, 0.0, 0.0, last="answer"), "terminated_early"),
        (ended(Outcome.UNREADABLE, 0.0, 0.0), "unreadable"),
    ],
)
def test_stalling_and_giving_up_earn_as_little_as_the_worst_mistake(made, ending):
    assert episode_ending(made) == ending
    assert earned(made) == [0.0, -1.0]
    assert earned(made, failure=-0.5) == [0.0, -0.5]
    assert earned(made, **{ending: -0.25}) == [0.0, -0.25]
    assert earned(made, **{ending: 0.0}) == [0.0, 0.0]
    assert made.total_reward() == 0.0


def test_an_agent_that_says_it_has_finished_and_has_earns_its_success():
    assert earned(ended(Outcome.SUCCESS, 0.0, 1.0, last="terminate")) == [0.0, 1.0]


def test_credit_on_the_way_is_kept_and_nobody_pays_twice_for_a_mistake():
    assert earned(ended(Outcome.TRUNCATED, 0.25, 0.25)) == [0.25, -0.75]  # -1 + 0.5 in all
    assert earned(ended(Outcome.TRUNCATED, 0.0, -1.0)) == [0.0, -1.0]
    assert earned(ended(Outcome.TRUNCATED, 0.0, -0.25)) == [0.0, -1.0]
    assert earned(ended(Outcome.TRUNCATED, 0.0, -0.25), truncated=0.0) == [0.0, -0.25]


@pytest.mark.parametrize("failure", [None, -2.0, -1.0, -0.5, 0.0])
@pytest.mark.parametrize("credit", [0.0, 0.25, 0.75])
def test_stopping_after_some_credit_earns_no_more_than_going_on_and_failing(failure, credit):
    failed, stalled = ended(Outcome.FAILURE, credit, -1.0), ended(Outcome.TRUNCATED, credit, 0.0)
    assert sum(earned(stalled, failure=failure)) == sum(earned(failed, failure=failure))
    assert sum(earned(failed, failure=failure)) == credit + (-1.0 if failure is None else failure)


def test_where_a_mistake_costs_nothing_neither_does_stalling():
    assert earned(ended(Outcome.TRUNCATED, 0.0, 0.5, reward_range=[0.0, 1.0])) == [0.0, 0.5]
    assert earned(ended(Outcome.TRUNCATED, 0.0, 0.0, reward_range=[0.5, 1.0])) == [0.0, 0.0]


def test_a_task_that_declares_no_range_is_taken_to_pay_the_assumed_one():
    assert earned(ended(Outcome.TRUNCATED, 0.0, reward_range=None)) == [-1.0]
    assert earned(ended(Outcome.TRUNCATED, 0.0, reward_range=None), assumed_range=(-3.0, 1.0)) == [-3.0]


def test_a_failure_can_be_given_a_price_of_its_own():
    assert earned(ended(Outcome.FAILURE, 0.25, -1.25), failure=-0.5) == [0.25, -0.5]
    assert earned(ended(Outcome.FAILURE, 0.0, 0.5), failure=-0.5) == [0.0, 0.0]


def test_every_unreadable_reply_costs_its_share_whatever_the_ending():
    unread = turn(action=None, unreadable="no action")
    made = episode(unread, turn(reward=1.0), outcome=Outcome.SUCCESS, task=TASK)
    assert earned(made) == [-0.1, 1.0]
    three = episode(unread, unread, unread, outcome=Outcome.UNREADABLE, task=TASK)
    assert earned(three) == pytest.approx([-0.1, -0.1, -1.1])
    assert earned(three, unreadable_reply=0.0, unreadable=0.0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("paid", [-1.0, -0.3, 0.0, 0.4, 0.99])
@pytest.mark.parametrize("low", [-2.0, -1.0, 0.0])
def test_by_default_not_finishing_never_earns_more_than_failing_with_the_same_credit(paid, low):
    for outcome, last in ((Outcome.TRUNCATED, None), (Outcome.UNREADABLE, None), (Outcome.FAILURE, "terminate")):
        made = ended(outcome, paid, last=last, reward_range=[low, 1.0])
        # The worst mistake, at the same point of the episode, would have cost the task's least.
        assert sum(earned(made)) <= min(low, 0.0) + max(paid, 0.0)
        assert sum(earned(made)) <= paid


@pytest.mark.parametrize("name", ["truncated", "terminated_early", "unreadable"])
def test_a_configuration_that_pays_more_for_not_finishing_than_for_failing_is_warned_about(name):
    told = reward_warnings(RewardConfig(**{name: -0.5}), -1.0, task="miniwob/click-test")
    assert len(told) == 1
    assert f"reward.{name} = -0.5 is above the reward of a mistake in miniwob/click-test (-1)" in told[0]
    assert "Use null or at most -1" in told[0]
    assert reward_warnings(RewardConfig(**{name: -1.0}), -1.0, task="t") == []
    assert reward_warnings(RewardConfig(**{name: 0.0}), 0.0, task="t") == []
    assert reward_warnings(RewardConfig(), -1.0, task="t") == []
    assert len(reward_warnings(RewardConfig(**{name: -0.5}, failure=-0.75), -0.5, task="t")) == 1
    with pytest.raises(ValueError, match="less than or equal to 0"):
        RewardConfig(**{name: 0.5})


def test_a_group_of_mistakes_and_stalls_teaches_to_stall_only_when_stalling_pays_more():
    """A mistake is paid -1 and a stall nothing, as in MiniWoB: the contrast is gone by default."""
    policy, rng = TablePolicy(), np.random.default_rng(0)
    made = [play(policy, rng, seed=1, name=f"e{number}", group="g", length=1) for number in range(4)]
    stalled = [number % 2 == 0 for number in range(4)]
    group = [
        episode(
            *(turn(1, one.turns[0].token_ids, one.turns[0].log_probs, reward=0.0 if stall else -1.0),),
            name=one.episode_id, group="g", outcome=Outcome.TRUNCATED if stall else Outcome.FAILURE, task=TASK,
        )
        for one, stall in zip(made, stalled, strict=True)
    ]  # fmt: skip
    config = UpdateConfig(learning_rate=0.1)
    assert TrajectoryLearner(policy, GRPO(group_size=4), config).admit(group) == []
    paying = TrajectoryLearner(policy, GRPO(group_size=4), config, reward=RewardConfig(truncated=0.0))
    assert len(paying.admit(group)) == 4


def test_a_step_penalty_charges_the_turns_of_a_success_and_the_whole_limit_otherwise():
    assert earned(ended(Outcome.SUCCESS, 0.0, 1.0, step_limit=5), step_penalty=-0.25) == [-0.25, 0.75]
    assert earned(ended(Outcome.FAILURE, 0.0, -1.0, step_limit=5), step_penalty=-0.25) == [-0.25, -2.0]  # -1 - 5 / 4
    assert earned(ended(Outcome.TRUNCATED, *[0.0] * 5, step_limit=5), step_penalty=-0.25)[-1] == -1.25
    assert earned(ended(Outcome.FAILURE, 0.0, step_limit=5, last="terminate"), step_penalty=-0.25) == [-2.25]
    # Replies beyond the limit were unreadable and are charged as such; the archive keeps what was paid.
    long = ended(Outcome.SUCCESS, 0.0, 0.0, 1.0, step_limit=2)
    assert earned(long, step_penalty=-0.25) == [-0.25, -0.25, 1.0]
    assert long.total_reward() == 1.0
    assert earned(ended(Outcome.SUCCESS, 0.0, 1.0)) == [0.0, 1.0]  # 0 by default


ENDINGS = st.sampled_from(
    [(Outcome.FAILURE, None), (Outcome.FAILURE, "terminate"), (Outcome.TRUNCATED, None), (Outcome.UNREADABLE, None)]
)


@given(
    penalty=st.floats(-2, 0),
    limit=st.integers(1, 12),
    one=st.tuples(ENDINGS, st.integers(1, 12)),
    other=st.tuples(ENDINGS, st.integers(1, 12)),
    solved=st.integers(1, 12),
)
def test_with_a_step_penalty_unsolved_episodes_keep_their_order_and_a_success_its_lead(
    penalty, limit, one, other, solved
):
    def total(outcome, last, turns, **config):
        paid = [0.0] * (turns - 1) + [1.0 if outcome is Outcome.SUCCESS else -1.0 if last is None else 0.0]
        return sum(earned(ended(outcome, *paid, last=last, step_limit=limit), **config))

    (first, turns), (second, more) = one, other
    before = total(*first, min(turns, limit)) - total(*second, min(more, limit))
    after = total(*first, min(turns, limit), step_penalty=penalty) - total(
        *second, min(more, limit), step_penalty=penalty
    )
    assert after == pytest.approx(before, abs=1e-9)
    success = total(Outcome.SUCCESS, None, min(solved, limit), step_penalty=penalty)
    assert success >= 2.0 - 1e-9 + total(*first, min(turns, limit), step_penalty=penalty)
