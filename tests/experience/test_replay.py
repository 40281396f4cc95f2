"""The replay buffer returns what was added, by numbers that can be checked by hand and against a plain list."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palaestra.errors import ConfigError, ExperienceError
from palaestra.experience.columns import ArraySpec
from palaestra.experience.replay import ReplayBuffer

NUMBER = ArraySpec((1,), np.dtype(np.float32))
ACTION = ArraySpec((), np.dtype(np.int64))


def _buffer(capacity, **settings):
    return ReplayBuffer(capacity, NUMBER, ACTION, **settings)


def _add(buffer, *numbers):
    """Transitions whose observation is n, action 10 n, reward 100 n, next observation n + 1, terminated for even n."""
    n = np.array(numbers)
    buffer.add(n[:, None], 10 * n, 100 * n, n[:, None] + 1, n % 2 == 0)


def _contents(buffer):
    columns = buffer.read(np.arange(buffer.size))
    return sorted(columns["observation"][:, 0].tolist())


def test_the_fifth_transition_overwrites_the_first_of_four():
    buffer = _buffer(4)
    _add(buffer, 1, 2, 3)
    _add(buffer, 4, 5)

    assert _contents(buffer) == [2, 3, 4, 5]
    columns = buffer.read(np.array([0, 3]))
    assert columns["observation"][:, 0].tolist() == [5, 4]
    assert columns["action"].tolist() == [50, 40]
    assert columns["reward"].tolist() == [500, 400]
    assert columns["next_observation"][:, 0].tolist() == [6, 5]
    assert columns["terminated"].tolist() == [False, True]


def test_more_transitions_at_once_than_fit_are_refused():
    with pytest.raises(ExperienceError, match="3 transitions at once, the capacity is 2"):
        _add(_buffer(2), 1, 2, 3)


def test_an_empty_buffer_cannot_be_sampled():
    with pytest.raises(ExperienceError, match="empty"):
        _buffer(2).sample(np.random.default_rng(0), 1, 1)


def test_a_buffer_that_does_not_fit_into_memory_is_refused_before_it_is_allocated():
    with pytest.raises(ConfigError, match=r"algorithm\.buffer_size.*TB of memory"):
        ReplayBuffer(10**9, ArraySpec((84, 84, 4), np.dtype(np.uint8)), ACTION)


def test_observations_of_several_parts_stay_together():
    spec = {"left": NUMBER, "right": ArraySpec((2,), np.dtype(np.float32))}
    buffer = ReplayBuffer(2, spec, ACTION)
    one = {"left": np.array([[1.0]]), "right": np.array([[2.0, 3.0]])}
    two = {"left": np.array([[4.0]]), "right": np.array([[5.0, 6.0]])}
    buffer.add(one, np.array([7]), np.array([8.0]), two, np.array([False]))

    columns = buffer.sample(np.random.default_rng(0), 1, 3).columns
    assert columns["observation"]["right"].tolist() == [[[2.0, 3.0]] * 3]
    assert columns["next_observation"]["left"].tolist() == [[[4.0]] * 3]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 7), st.lists(st.integers(1, 7), max_size=12), st.integers(1, 7))
def test_the_buffer_holds_the_newest_transitions_also_after_it_was_stored(capacity, groups, other):
    buffer, model, number = _buffer(capacity), [], 0
    for count in groups:
        numbers = list(range(number, number + min(count, capacity)))
        number += len(numbers)
        if numbers:
            _add(buffer, *numbers)
        model = (model + numbers)[-capacity:]
        assert _contents(buffer) == model
    arrays, facts = buffer.state()
    restored = _buffer(other)
    restored.load_state({name: array.copy() for name, array in arrays.items()}, facts)
    assert _contents(restored) == model[-other:]
    _add(restored, number)
    assert _contents(restored) == [*model, number][-min(other, len(model[-other:]) + 1) :]


# ---------------------------------------------------------------------- priorities


def test_transitions_are_drawn_in_proportion_to_their_priority():
    buffer = _buffer(4, priority_exponent=1.0)
    _add(buffer, 1, 2, 3)
    batch = buffer.sample(np.random.default_rng(0), 1, 3, importance_exponent=1.0)
    batch.index = np.array([[0, 1, 2]])
    batch.td_error = np.array([[1.0, 2.0, 5.0]], np.float32)
    buffer.update_priorities(batch)

    drawn = buffer.sample(np.random.default_rng(1), 100, 80, importance_exponent=1.0)
    counts = np.bincount(drawn.index.reshape(-1), minlength=4)
    # Stratified: of 80 shares of the total of 8, ten belong to the first, 20 to the second and 50 to the third.
    assert counts.tolist() == [1000, 2000, 5000, 0]
    # 1 / (3 P) with P = 1/8, 2/8, 5/8, divided by the largest.
    weights = {int(i): float(w) for i, w in zip(drawn.index[0], drawn.columns["weight"][0], strict=True)}
    assert weights == pytest.approx({0: 1.0, 1: 0.5, 2: 0.2}, abs=1e-4)


def test_a_new_transition_gets_the_largest_priority_so_far():
    buffer = _buffer(2, priority_exponent=1.0)
    _add(buffer, 1)
    batch = buffer.sample(np.random.default_rng(0), 1, 1)
    batch.td_error = np.array([[3.0]], np.float32)
    buffer.update_priorities(batch)
    _add(buffer, 2)

    assert buffer.state()[0]["priority"] == pytest.approx([3.0, 3.0], abs=1e-5)


def test_the_largest_priority_survives_a_resume_although_its_transition_was_overwritten():
    buffer, resumed = _buffer(1, priority_exponent=1.0), _buffer(1, priority_exponent=1.0)
    _add(buffer, 1)
    for error in (9.0, 0.5):
        batch = buffer.sample(np.random.default_rng(0), 1, 1)
        batch.td_error = np.array([[error]], np.float32)
        buffer.update_priorities(batch)
    resumed.load_state(*buffer.state())
    _add(buffer, 2)
    _add(resumed, 2)

    assert buffer.state()[0]["priority"] == pytest.approx([9.0], abs=1e-5)
    assert resumed.state()[0]["priority"] == pytest.approx([9.0], abs=1e-5)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 8), st.floats(0, 100)), min_size=1, max_size=20))
def test_probabilities_are_those_of_a_plain_list(capacity, updates):
    buffer = _buffer(capacity, priority_exponent=1.0)
    _add(buffer, *range(capacity))
    model = [1.0] * capacity
    for place, error in updates:
        batch = buffer.sample(np.random.default_rng(0), 1, 1)
        batch.index = np.array([[place % capacity]])
        batch.td_error = np.array([[error]], np.float32)
        buffer.update_priorities(batch)
        model[place % capacity] = abs(float(np.float32(error))) + 1e-6
    drawn = buffer.sample(np.random.default_rng(2), 4, 16, importance_exponent=1.0)
    for g in range(4):
        inverse = np.array([sum(model) / (capacity * model[i]) for i in drawn.index[g]])
        assert drawn.columns["weight"][g] == pytest.approx(inverse / inverse.max(), rel=1e-4)
