"""Advantages and returns against tables worked out by hand and against the definition, written as a double sum."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from palaestra.learner.compiled import compiled_gae
from palaestra.learner.returns import explained_variance, gae


def _ends(length, *positions):
    flags = torch.zeros(length, dtype=torch.bool)
    flags[list(positions)] = True
    return flags


def test_a_truncated_step_bootstraps_from_what_came_next_and_a_terminated_one_does_not():
    reward, value, next_value = tensor([1.0, 1.0]), tensor([1.0, 1.0]), tensor([1.0, 2.0])
    last, never = tensor([False, True]), tensor([False, False])

    cut_short = gae(reward, value, next_value, terminated=never, truncated=last, discount=0.5, lam=1.0)
    finished = gae(reward, value, next_value, terminated=last, truncated=never, discount=0.5, lam=1.0)

    assert cut_short.tolist() == [1.0, 1.0]  # 1 + .5*2 - 1 = 1;   (1 + .5*1 - 1) + .5*1 = 1
    assert finished.tolist() == [0.5, 0.0]  # 1 + 0 - 1 = 0;      (1 + .5*1 - 1) + .5*0 = .5


# gamma = lambda = 1/2, so a later advantage counts a quarter; every number below is exact in binary.
REWARD, VALUE, NEXT_VALUE = tensor([1.0, 1.0, 1.0, 1.0]), tensor([1.0, 2.0, 3.0, 4.0]), tensor([2.0, 6.0, 4.0, 5.0])


@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [
        # deltas: 1+1-1 = 1, 1+3-2 = 2, 1+2-3 = 0, 1+2.5-4 = -0.5
        ((), (), [1.4921875, 1.96875, -0.125, -0.5]),  # 1 + 1.96875/4; 2 - .125/4; -.5/4; -.5
        ((), (1,), [1.5, 2.0, -0.125, -0.5]),  # step 1 keeps its bootstrap of 6 and hears nothing of step 2
        ((1,), (), [0.75, -1.0, -0.125, -0.5]),  # step 1 loses the bootstrap: 1 - 2
        ((1,), (1,), [0.75, -1.0, -0.125, -0.5]),  # both: termination wins
        ((3,), (), [1.453125, 1.8125, -0.75, -3.0]),  # the last step: 1 - 4, then a quarter back each time
        ((), (3,), [1.4921875, 1.96875, -0.125, -0.5]),  # cut at the edge: the same as an edge that was not cut
        ((0, 2), (1, 3), [0.0, 2.0, -2.0, -0.5]),  # every step ends its episode: just the deltas
    ],
)
def test_advantages_equal_the_table_worked_out_by_hand(terminated, truncated, expected):
    flags = {"terminated": _ends(4, *terminated), "truncated": _ends(4, *truncated)}
    found = gae(REWARD, VALUE, NEXT_VALUE, **flags, discount=0.5, lam=0.5)
    assert found.tolist() == expected


def test_an_episode_that_ended_before_does_not_hear_what_the_next_one_earned():
    # The numbers of a well-known mistake (reading the end one step late), which gave [-0.5, 0.986, ...] here.
    reward, value = tensor([0.0, 1.0, 0.0, 0.0]), torch.full((4,), 0.5)
    found = gae(
        reward, value, value, terminated=_ends(4, 1), truncated=_ends(4), discount=0.99, lam=0.95
    )  # fmt: skip
    assert found[:2].tolist() == pytest.approx([0.46525, 0.5])  # .99*.5 - .5 + .9405*.5;  1 - .5


def test_environments_side_by_side_do_not_hear_each_other():
    flags = {"terminated": torch.stack([_ends(4), _ends(4, 1)], 1), "truncated": torch.zeros(4, 2, dtype=torch.bool)}
    doubled = [column.unsqueeze(1).expand(4, 2) for column in (REWARD, VALUE, NEXT_VALUE)]
    found = gae(*doubled, **flags, discount=0.5, lam=0.5)
    assert found[:, 0].tolist() == [1.4921875, 1.96875, -0.125, -0.5]
    assert found[:, 1].tolist() == [0.75, -1.0, -0.125, -0.5]


def _by_definition(reward, value, next_value, terminated, truncated, discount, lam):
    """The sum over l of (discount * lam)^l * delta[t + l], stopping behind the first end."""
    advantage = []
    for t in range(len(reward)):
        total = 0.0
        for s in range(t, len(reward)):
            future = 0.0 if terminated[s] else next_value[s]
            total += (discount * lam) ** (s - t) * (reward[s] + discount * future - value[s])
            if terminated[s] or truncated[s]:
                break
        advantage.append(total)
    return advantage


def _check_against_definition(numbers, terminated, truncated, discount, lam):
    columns = [torch.tensor(column, dtype=torch.float64) for column in numbers]
    flags = {"terminated": torch.tensor(terminated), "truncated": torch.tensor(truncated)}
    expected = _by_definition(*numbers, terminated, truncated, discount, lam)
    plain = gae(*columns, **flags, discount=discount, lam=lam)
    assert plain.tolist() == pytest.approx(expected, abs=1e-9)
    reward, value, next_value = (column.float().unsqueeze(1) for column in columns)
    rollout = {"value": value, "next_value": next_value} | {k: v.unsqueeze(1) for k, v in flags.items()}
    fast = compiled_gae(rollout, reward, discount=discount, lam=lam)
    assert fast[:, 0].tolist() == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("position", range(6))
@pytest.mark.parametrize("kind", ["terminated", "truncated", "both"])
def test_an_end_at_any_position_gives_the_double_sum_of_the_definition(position, kind):
    rng = np.random.default_rng(position)
    numbers = rng.normal(size=(3, 6)).tolist()
    flags = [i == position for i in range(6)]
    never = [False] * 6
    _check_against_definition(
        numbers, never if kind == "truncated" else flags, never if kind == "terminated" else flags, 0.9, 0.8
    )


numbers = st.floats(-10, 10, width=32)
fractions = st.floats(0, 1, width=32)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 8), fractions, fractions)
def test_any_pattern_of_ends_gives_the_double_sum_of_the_definition(data, length, discount, lam):
    columns = [data.draw(st.lists(numbers, min_size=length, max_size=length)) for _ in range(3)]
    ends = [data.draw(st.lists(st.booleans(), min_size=length, max_size=length)) for _ in range(2)]
    _check_against_definition(columns, *ends, discount, lam)


def test_the_inputs_are_left_as_they_were():
    columns = [REWARD.clone(), VALUE.clone(), NEXT_VALUE.clone()]
    gae(*columns, terminated=_ends(4, 1), truncated=_ends(4, 2), discount=0.9, lam=0.9)
    assert all(torch.equal(after, before) for after, before in zip(columns, (REWARD, VALUE, NEXT_VALUE), strict=True))


def test_with_lambda_1_the_advantage_is_the_return_minus_the_value():
    flags = {"terminated": _ends(4, 1), "truncated": _ends(4, 2)}
    advantage = gae(REWARD, VALUE, NEXT_VALUE, **flags, discount=0.5, lam=1.0)
    # Step 1 terminates; step 2 is cut short where the future was worth 4; the last step runs on into a value of 5.
    returns = [1.0, 1.0 + 0.5 * 4.0, 1.0 + 0.5 * 5.0]
    # Across an ordinary step the two agree only when next_value is the value that follows, as it is in a rollout.
    assert (advantage + VALUE)[1:].tolist() == returns


def test_explained_variance_is_1_for_a_perfect_guess_and_0_for_a_constant_one():
    target = tensor([1.0, 2.0, 3.0])
    assert explained_variance(target, target) == 1.0
    assert explained_variance(torch.full((3,), 7.0), target) == 0.0
    assert explained_variance(-target, target) == pytest.approx(-3.0)  # Var(2 target) is 4 Var(target)
    assert math.isnan(explained_variance(target, torch.ones(3)))  # nothing to explain


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=20))
def test_explained_variance_never_exceeds_1(pairs):
    prediction, target = torch.tensor(pairs).unbind(1)
    found = explained_variance(prediction, target)
    assert math.isnan(found) or found <= 1.0
