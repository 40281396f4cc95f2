"""The rollout buffer: what goes in comes out, what does not fit is refused, and nothing is held twice."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from palaestra.errors import ExperienceError
from palaestra.experience import ArraySpec, RolloutBuffer

FLOAT, INT, BYTE = np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.uint8)


def _buffer(steps=4, envs=2, **kwargs):
    return RolloutBuffer(steps, envs, ArraySpec((3,), FLOAT), ArraySpec((), INT), **kwargs)


def _nbytes(buffer):
    return sum(array.nbytes for array in buffer._arrays())


def _step(number, envs=2):
    return {
        "observation": np.full((envs, 3), number, np.float32),
        "action": np.full(envs, number),
        "log_prob": np.full(envs, -number, np.float32),
        "value": np.full(envs, 10 * number, np.float32),
        "next_value": np.full(envs, 100 * number, np.float32),
        "reward": np.full(envs, number, np.float32),
        "terminated": np.zeros(envs, bool),
        "truncated": np.zeros(envs, bool),
    }


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 8), st.integers(1, 3), st.data())
def test_any_order_of_adding_and_resetting_keeps_what_was_added_since_the_last_reset(steps, envs, data):
    buffer, expected = _buffer(steps, envs), []
    for number in range(data.draw(st.integers(0, 20), label="calls")):
        if data.draw(st.booleans(), label="reset"):
            buffer.reset()
            expected = []
        elif buffer.is_full():
            with pytest.raises(ExperienceError):
                buffer.add(_step(number, envs))
        else:
            buffer.add(_step(number, envs))
            expected.append(float(number))
        assert buffer.is_full() == (len(expected) == steps)
        rollout = buffer.get()
        assert rollout.batch_size == (len(expected), envs)
        assert rollout["reward"][:, 0].tolist() == expected
        assert rollout["observation"][:, -1, 2].tolist() == expected


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_many_steps_at_once_are_the_same_as_one_by_one(pieces):
    total = sum(pieces)
    whole = [_step(number) for number in range(total)]
    singly, in_pieces = _buffer(total), _buffer(total)
    for step in whole:
        singly.add(step)
    at = 0
    for size in pieces:
        in_pieces.add({key: np.stack([step[key] for step in whole[at : at + size]]) for key in whole[0]})
        at += size
    assert (singly.get() == in_pieces.get()).all()


def test_a_full_buffer_refuses_more_and_says_what_to_do():
    buffer = _buffer(1)
    buffer.add(_step(0))
    with pytest.raises(ExperienceError, match=r"all 1 steps are filled. Call get\(\) and reset\(\)"):
        buffer.add(_step(1))


def test_more_steps_than_are_left_are_refused_and_nothing_is_written():
    buffer = _buffer(3)
    buffer.add(_step(1))
    with pytest.raises(ExperienceError, match="3 steps do not fit into the 2 left of 3"):
        buffer.add({key: np.stack([value] * 3) for key, value in _step(2).items()})
    assert buffer.get()["reward"].tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("observation", np.zeros((2, 4), np.float32)),
        ("observation", np.zeros(3, np.float32)),  # numpy would spread one observation over both environments
        ("reward", np.zeros(3, np.float32)),
        ("action", np.zeros((2, 1), np.int64)),
        ("terminated", False),
    ],
)
def test_a_wrong_shape_is_refused_by_name(key, wrong):
    buffer = _buffer()
    with pytest.raises(ExperienceError, match=key):
        buffer.add(_step(0) | {key: wrong})
    assert len(buffer.get()) == 0


def test_one_step_among_columns_of_several_is_refused():
    buffer = _buffer()
    several = {key: np.stack([value] * 2) for key, value in _step(0).items()}
    with pytest.raises(ExperienceError, match="value has shape"):
        buffer.add(several | {"value": np.zeros(2, np.float32)})


def test_a_step_without_a_reward_is_refused():
    step = _step(0)
    del step["reward"]
    with pytest.raises(ExperienceError, match="reward"):
        _buffer().add(step)


def test_an_unknown_column_is_refused():
    with pytest.raises(ExperienceError, match="no column 'rewards'"):
        _buffer().add(_step(0) | {"rewards": np.zeros(2)})


def test_a_step_may_be_a_tensordict():
    buffer = _buffer()
    step = TensorDict({key: torch.as_tensor(value) for key, value in _step(5).items()}, batch_size=2)
    buffer.add(step)
    assert buffer.get()["action"].tolist() == [[5, 5]]


def test_a_key_that_is_missing_after_a_reset_is_zero_and_not_what_was_there_before():
    buffer = _buffer(1)
    buffer.add(_step(7) | {"truncated": np.ones(2, bool)})
    buffer.reset()
    buffer.add({key: value for key, value in _step(3).items() if key not in ("truncated", "value")})
    rollout = buffer.get()
    assert rollout["truncated"].tolist() == [[False, False]]
    assert rollout["value"].tolist() == [[0.0, 0.0]]


def test_nested_observations_have_a_column_per_name():
    parts = {"camera": ArraySpec((2, 2, 3), BYTE), "body/joints": ArraySpec((2,), FLOAT)}
    buffer = RolloutBuffer(2, 1, parts, ArraySpec((), INT))
    step = {key: value[:1] for key, value in _step(1).items()}
    step["observation"] = {"camera": np.full((1, 2, 2, 3), 200, np.uint8), "body/joints": np.ones((1, 2))}
    buffer.add(step)
    rollout = buffer.get()
    assert rollout["observation", "camera"].dtype == torch.uint8
    assert rollout["observation", "body/joints"].tolist() == [[[1.0, 1.0]]]


def test_flattening_puts_environments_next_to_each_other_within_a_step():
    buffer = _buffer(2, 2)
    for number in (1, 2):
        buffer.add(_step(number) | {"reward": np.array([number, 10 * number], np.float32)})
    flat = buffer.get(flatten=True)
    assert flat.batch_size == (4,)
    assert flat["reward"].tolist() == [1.0, 10.0, 2.0, 20.0]


def test_what_get_gives_shares_the_buffers_memory():
    buffer = _buffer(1)
    buffer.add(_step(1))
    rollout = buffer.get()
    buffer.reward[0, 0] = 42.0
    assert rollout["reward"][0, 0] == 42.0


def test_every_step_knows_its_environment_and_its_place():
    buffer = _buffer(2, 3)
    buffer.first_stream, buffer.first_env_step = 30, 7
    for number in (0, 1):
        buffer.add({**_step(number, 3), "policy_version": np.full(3, 4 + number)})
    rollout = buffer.get()
    assert rollout["stream"].tolist() == [[30, 31, 32]] * 2
    assert rollout["env_step"].tolist() == [[7] * 3, [8] * 3]
    assert rollout["policy_version"].tolist() == [[4] * 3, [5] * 3]


def test_a_rollout_of_2048_by_16_takes_little_more_than_its_numbers():
    T, N = 2048, 16
    buffer = RolloutBuffer(T, N, ArraySpec((8,), FLOAT), ArraySpec((2,), FLOAT))
    # observation 8, action 2, log_prob, value, next_value, reward: 14 floats; terminated, truncated, valid: 3 bytes.
    raw = T * N * (14 * 4 + 3)
    assert raw <= _nbytes(buffer) <= 1.2 * raw
    buffer.position = T
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in buffer.get().values()}
    assert sum(held.values()) <= 1.2 * raw  # what get() adds are views


def test_pixels_are_kept_as_bytes():
    buffer = RolloutBuffer(16, 4, ArraySpec((84, 84, 4), BYTE), ArraySpec((), INT))
    assert _nbytes(buffer) < 1.2 * 16 * 4 * 84 * 84 * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action": np.zeros(2, np.float32)}, "action is float32, which cannot be stored as int64"),
        ({"terminated": np.zeros(2, np.float32)}, "terminated is float32"),
        ({"reward": np.array(["a", "b"])}, "reward is <U1"),
        ({"observation": np.zeros(2)}, r"observation holds one array, expected the parts \['sign'\]"),
        ({"observation": {"sing": np.zeros(2)}}, r"observation holds \['sing'\]"),
        ({"policy_version": np.zeros(2)}, "policy_version is float64"),
        ({"policy_version": np.zeros(0, np.int64)}, "expected one whole number for each of 1 steps"),
        ({"policy_fingerprint": np.arange(2)}, "must act on one policy_fingerprint"),
        ({"made_for": np.zeros(2)}, "there is no column 'made_for'"),
    ],
)
def test_a_step_that_would_become_something_else_is_refused(changes, message):
    buffer = RolloutBuffer(3, 2, {"sign": ArraySpec((), np.dtype(np.float32))}, ArraySpec((), np.dtype(np.int64)))
    step = {"reward": np.ones(2), "observation": {"sign": np.ones(2)}, "action": np.ones(2, np.int64)}
    with pytest.raises(ExperienceError, match=message):
        buffer.add(step | changes)
    assert buffer.position == 0
    buffer.add(step | {"terminated": [0, 1]})  # flags may be written as numbers
    assert buffer.columns()["terminated"].tolist() == [[False, True]]


_PARTS = st.one_of(
    st.none(), st.integers(-3, 3), st.floats(), st.text(max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers()),
    st.builds(
        lambda shape, dtype: np.zeros(shape, dtype),
        st.lists(st.integers(0, 3), max_size=3),
        st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.bool_, np.complex64]),
    ),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            ["reward", "observation", "action", "log_prob", "valid", "policy_version", "env_step", "other"]
        ),
        _PARTS,
    )
)
def test_whatever_is_added_is_refused_by_name_or_recorded(step):
    buffer = RolloutBuffer(3, 2, ArraySpec((3,), np.dtype(np.float32)), ArraySpec((), np.dtype(np.int64)))
    try:
        buffer.add(step)
    except ExperienceError:
        assert buffer.position == 0
    else:
        reward = np.asarray(step["reward"])
        assert buffer.position == (len(reward) if reward.ndim == 2 else 1)
