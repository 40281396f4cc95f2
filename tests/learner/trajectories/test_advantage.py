"""Advantages of groups and of turns, against tables one can check by hand and a slow oracle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palaestra.learner.trajectories.built_in import group_advantages, step_gae

numbers = st.floats(-10, 10)


def test_one_success_among_four_is_three_quarters_above_the_mean():
    assert group_advantages([1, 0, 0, 0], "none").tolist() == [0.75, -0.25, -0.25, -0.25]


def test_dividing_by_the_spread_makes_a_mixed_pair_one_and_minus_one():
    assert group_advantages([5.0, 1.0], "std", eps=0).tolist() == [1.0, -1.0]
    assert group_advantages([1.0, 0.0], "std", eps=0).tolist() == [1.0, -1.0]


def test_a_group_in_which_all_earned_the_same_teaches_nothing():
    assert group_advantages([0.5, 0.5, 0.5], "std").tolist() == [0.0, 0.0, 0.0]


@settings(deadline=None)
@given(st.lists(numbers, min_size=2, max_size=9), numbers)
def test_a_constant_added_to_every_reward_changes_no_advantage(rewards, shift):
    moved = [reward + shift for reward in rewards]
    assert group_advantages(moved, "none") == pytest.approx(group_advantages(rewards, "none"), abs=1e-9)
    assert sum(group_advantages(rewards, "none")) == pytest.approx(0, abs=1e-9)


def test_three_turns_by_hand():
    # surprises: 0+.5*2-1=0; 0+.5*4-2=0; 1+0-4=-3; carried back by .5*.5=.25
    assert step_gae([0, 0, 1], [1, 2, 4], gamma=0.5, gae_lambda=0.5).tolist() == [-0.1875, -0.75, -3.0]


def test_an_episode_cut_short_counts_on_the_future_and_one_that_ended_does_not():
    cut = step_gae([0.0, 1.0], [2.0, 4.0], gamma=0.5, gae_lambda=1.0, last_value=4.0)
    ended = step_gae([0.0, 1.0], [2.0, 4.0], gamma=0.5, gae_lambda=1.0)
    assert cut.tolist() == [-0.5, -1.0]  # 1+.5*4-4=-1; 0+.5*4-2=0, and .5*-1
    assert ended.tolist() == [-1.5, -3.0]


def test_every_turn_needs_a_value():
    with pytest.raises(ValueError, match="each turn needs one of each"):
        step_gae([0.0, 1.0], [2.0], gamma=1, gae_lambda=1)


@settings(deadline=None)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=12), st.floats(0, 1), st.floats(0, 1), numbers)
def test_the_recursion_is_the_double_sum_of_the_definition(turns, gamma, lam, last):
    rewards, values = np.array(turns).T
    after = [*values[1:], last]
    surprise = [r + gamma * n - v for r, v, n in zip(rewards, values, after, strict=True)]
    slow = [sum((gamma * lam) ** (k - t) * surprise[k] for k in range(t, len(surprise))) for t in range(len(surprise))]
    assert step_gae(rewards, values, gamma=gamma, gae_lambda=lam, last_value=last) == pytest.approx(slow, abs=1e-9)
