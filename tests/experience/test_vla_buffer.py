"""The asynchronous ring: whole segments in time order, never overwritten while read, nothing lost uncounted."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from palaestra.errors import ConfigError, ExperienceError
from palaestra.experience import ArraySpec
from palaestra.experience.vla_buffer import VLABuffer
from palaestra.learner.returns import gae

NUMBER = ArraySpec((), np.dtype(np.float32))


def _ring(buffer_size, segment_length=1, num_envs=1, overflow="block"):
    return VLABuffer(buffer_size, num_envs, NUMBER, NUMBER, segment_length=segment_length, overflow=overflow)


def _step(number, num_envs=1):
    """Step `number` of environment n pays 10 n + number."""
    reward = np.arange(num_envs, dtype=np.float32) * 10 + number
    return {"observation": reward, "action": reward, "reward": reward}


def _slots(ring):
    """What lies where, as the specification draws it."""
    return ["_" if segment.position == 0 else f"T{int(segment.reward[0, 0])}" for segment in ring.segments]


def test_the_circular_example_of_the_specification():
    ring = VLABuffer(4, 1, NUMBER, NUMBER)  # nothing but what the specification names
    drawn = []
    for number in range(6):
        ring.add(_step(number))
        drawn.append(_slots(ring))
    assert drawn == [
        ["T0", "_", "_", "_"],
        ["T0", "T1", "_", "_"],
        ["T0", "T1", "T2", "_"],
        ["T0", "T1", "T2", "T3"],
        ["T4", "T1", "T2", "T3"],
        ["T4", "T5", "T2", "T3"],
    ]
    assert ring.is_full()
    assert ring.dropped_steps == 2
    assert ring.get()["reward"].squeeze(1).tolist() == [2.0, 3.0, 4.0, 5.0]  # oldest first, whatever the seam
    assert not ring.is_full()
    assert len(ring) == 0


def test_in_one_thread_a_buffer_with_its_defaults_trains_when_full_again_and_again():
    buffer, windows = VLABuffer(4, 1, NUMBER, NUMBER), []
    for number in range(11):
        buffer.add(_step(number))
        if buffer.is_full():
            windows.append(buffer.get(flatten=True)["reward"].tolist())
    assert windows == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    assert len(buffer) == 3  # 8, 9 and 10 wait for the next one
    assert buffer.dropped_steps == 0


def test_what_get_returned_stays_as_it_was_when_the_ring_goes_round():
    buffer = VLABuffer(2, 1, NUMBER, NUMBER)
    for number in range(2):
        buffer.add(_step(number))
    window = buffer.get()
    for number in range(5):
        buffer.add(_step(100 + number))
    assert window["reward"].squeeze(1).tolist() == [0.0, 1.0]
    assert window["env_step"].squeeze(1).tolist() == [0, 1]
    assert buffer.get()["env_step"].squeeze(1).tolist() == [5, 6]


def test_environments_are_columns_and_never_one_interleaved_stream():
    ring = _ring(3, num_envs=2)
    for number in (1, 2, 3):
        ring.add(_step(number, 2))
    rollout = ring.get()
    assert rollout["reward"].tolist() == [[1, 11], [2, 12], [3, 13]]
    zero, never = torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.bool)
    advantage = gae(rollout["reward"], zero, zero, terminated=never, truncated=never, discount=1.0, lam=1.0)
    assert advantage[0].tolist() == [6.0, 36.0]  # 1 + 2 + 3 and 11 + 12 + 13, not 42 for both


def test_batches_may_span_segments_and_come_out_as_they_went_in():
    ring = _ring(6, segment_length=2)
    reward = np.arange(5, dtype=np.float32)[:, None]
    ring.add({"observation": reward, "action": reward, "reward": reward})
    assert len(ring) == 2  # the fifth step waits for its neighbour
    assert ring.get(flatten=True)["reward"].tolist() == [0, 1, 2, 3]
    ring.add(_step(5))
    rollout = ring.get()
    assert rollout["reward"].squeeze(1).tolist() == [4, 5]
    assert rollout["env_step"].squeeze(1).tolist() == [4, 5]


def test_a_tensordict_with_nested_senses_goes_in_and_comes_out():
    senses = {"rgb": ArraySpec((2, 2, 3), np.dtype(np.uint8)), "language": ArraySpec((4,), np.dtype(np.int64))}
    ring = VLABuffer(2, 3, senses, ArraySpec((7,), np.dtype(np.float32)))
    seen = TensorDict(
        {"rgb": torch.full((3, 2, 2, 3), 200, dtype=torch.uint8), "language": torch.arange(12).view(3, 4)},
        batch_size=[3],
    )
    step = TensorDict({"observation": seen, "action": torch.ones(3, 7), "reward": torch.ones(3)}, batch_size=[3])
    ring.add(step)
    ring.add(step)
    rollout = ring.get()
    assert rollout["observation", "rgb"].dtype == torch.uint8
    assert rollout["observation", "language"][1].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert rollout.batch_size == (2, 3)


def test_a_full_ring_makes_the_writer_wait_until_a_reader_makes_room():
    ring = _ring(2, segment_length=1)
    ring.add(_step(0))
    ring.add(_step(1))
    with pytest.raises(ExperienceError, match=r"stayed full for 0.01 s. Read it"):
        ring.add(_step(2), timeout=0.01)
    writer = threading.Thread(target=ring.add, args=(_step(2),))
    writer.start()
    assert ring.get()["reward"].squeeze(1).tolist()[:2] == [0, 1]
    writer.join(10)
    assert not writer.is_alive()
    assert ring.dropped_steps == 0


def test_what_is_being_read_is_not_overwritten_however_much_is_written():
    ring = _ring(2, segment_length=1, overflow="overwrite_oldest")
    ring.add(_step(7))
    slot = ring.take()
    for number in range(20):
        ring.add(_step(number))
    assert ring.segments[slot].reward[0, 0] == 7.0
    ring.release(slot)
    assert ring.dropped_steps == 19  # of the twenty one is left
    assert ring.get()["reward"].item() == 19.0


def test_a_gap_ends_what_is_read_at_once_because_advantages_must_not_cross_it():
    ring = _ring(3, segment_length=1, overflow="overwrite_oldest")
    ring.add(_step(0))
    slot = ring.take()
    for number in (1, 2, 3):  # two slots for three steps: step 1 is lost
        ring.add(_step(number))
    ring.release(slot)
    assert ring.get()["env_step"].squeeze(1).tolist() == [2, 3]


def test_reading_an_empty_ring_says_what_to_ask_first():
    with pytest.raises(ExperienceError, match=r"no segment is complete yet. Check is_full"):
        _ring(4).get()


def test_a_segment_without_a_reward_is_refused():
    with pytest.raises(ExperienceError, match="reward is missing"):
        _ring(4).add({"action": np.zeros(1)})


@pytest.mark.parametrize(
    ("buffer_size", "segment_length", "message"),
    [
        (3, 4, "smaller than one segment of 4 steps. Give at least 4; 8 lets"),
        (10, 4, "does not hold whole segments of 4 steps. Nearest: 8 and 12"),
        (0, 1, "must be at least 1"),
    ],
)
def test_a_ring_that_holds_no_whole_segments_is_refused(buffer_size, segment_length, message):
    with pytest.raises(ConfigError, match=message):
        _ring(buffer_size, segment_length)


def test_a_ring_that_does_not_fit_into_memory_as_a_whole_is_refused():
    with pytest.raises(ConfigError, match=r"VLABuffer\(buffer_size\) = 1000000000000: it needs about .* environments"):
        _ring(10**12)


def test_an_unknown_overflow_is_refused():
    with pytest.raises(ConfigError, match="'block' or 'overwrite_oldest'"):
        _ring(4, overflow="drop")


def _addresses(ring):
    return [(array.ctypes.data, array.nbytes) for segment in ring.segments for array in segment._arrays()]


def test_all_memory_is_there_from_the_start():
    ring = _ring(8, segment_length=2)
    addresses = _addresses(ring)
    for number in range(8):
        ring.add(_step(number))
    assert _addresses(ring) == addresses


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["block", "overwrite_oldest"]),
    st.lists(st.one_of(st.integers(1, 5), st.just("get")), max_size=25),
)
def test_steps_come_out_once_in_order_or_are_counted(length, segments, overflow, actions):
    ring = _ring(length * segments, segment_length=length, overflow=overflow)
    written, read = 0, []
    for action in actions:
        if action == "get":
            if len(ring):
                read += ring.get()["env_step"].squeeze(1).tolist()
            continue
        for _ in range(action):
            if overflow == "block" and ring.is_full() and ring._filling is None:
                break
            ring.add(_step(written))
            written += 1
    while len(ring):
        read += ring.get()["env_step"].squeeze(1).tolist()
    unfinished = written % length
    assert read == sorted(set(read))
    assert len(read) + ring.dropped_steps + unfinished == written
