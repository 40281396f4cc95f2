"""The ring's bookkeeping: a slot is never filled while it is read, and nothing is lost that is not counted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.errors import ExperienceError
from palaestra.experience import ArraySpec, VLABuffer

NUMBER = ArraySpec((), np.dtype(np.float32))


def _ring(count, overflow="block"):
    return VLABuffer(count, 1, NUMBER, NUMBER, overflow=overflow)


def test_a_slot_goes_round_and_is_free_again():
    ring = _ring(1)
    assert ring.claim() == 0
    assert ring.claim() is None
    ring.commit(0)
    assert ring.claim() is None  # full and unread: block
    assert ring.take() == 0
    assert ring.claim() is None  # being read
    ring.release(0)
    assert ring.claim() == 0


def test_overwriting_takes_the_oldest_unread_and_counts_it():
    ring = _ring(2, "overwrite_oldest")
    for slot in (0, 1):
        assert ring.claim() == slot
        ring.commit(slot)
    assert ring.claim() == 0
    assert ring.dropped_steps == 1
    ring.commit(0)
    assert [ring.take(), ring.take()] == [1, 0]  # oldest first


def test_overwriting_never_takes_what_is_being_read():
    ring = _ring(1, "overwrite_oldest")
    ring.claim()
    ring.commit(0)
    ring.take()
    assert ring.claim() is None
    assert ring.dropped_steps == 0


def test_what_was_put_back_is_the_oldest_again():
    ring = _ring(3)
    for _ in range(2):
        ring.commit(ring.claim())
    ring.requeue(ring.take())
    assert [ring.take(), ring.take()] == [0, 1]


@pytest.mark.parametrize("step", ["commit", "abandon", "release", "requeue"])
def test_a_step_out_of_order_is_refused(step):
    with pytest.raises(ExperienceError, match="slot 0 of the ring is free"):
        getattr(_ring(1), step)(0, **({"steps": 0} if step == "abandon" else {}))


@given(
    st.integers(1, 4),
    st.sampled_from(["block", "overwrite_oldest"]),
    st.lists(st.sampled_from(["claim", "commit", "abandon", "take", "release", "requeue"]), max_size=60),
)
def test_every_segment_is_read_once_in_order_or_counted(count, overflow, steps):
    ring = _ring(count, overflow)
    filling: dict[int, int] = {}
    reading: dict[int, int] = {}
    contents: dict[int, int] = {}  # slot -> number of the segment committed in it
    committed = abandoned = claimed = 0
    read: list[int] = []
    for step in steps:
        if step == "claim":
            slot = ring.claim()
            if slot is not None:
                assert slot not in filling
                assert slot not in reading  # never overwritten while in use
                contents.pop(slot, None)
                filling[slot] = claimed
                claimed += 1
        elif step in ("commit", "abandon") and filling:
            slot = next(iter(filling))
            filling.pop(slot)
            if step == "commit":
                contents[slot] = committed
                committed += 1
                ring.commit(slot)
            else:
                abandoned += 1
                ring.abandon(slot, 0)
        elif step == "take":
            slot = ring.take()
            if slot is not None:
                reading[slot] = contents.pop(slot)
        elif step in ("release", "requeue") and reading:
            slot = next(reversed(reading))  # the last taken, so that order is kept when it goes back
            number = reading.pop(slot)
            if step == "release":
                read.append(number)
            else:
                contents[slot] = number
            getattr(ring, step)(slot)
    assert len(set(read)) == len(read)
    assert committed == len(read) + len(reading) + len(ring) + ring.dropped_steps
    busy = sum(state != "free" for state in ring.states)
    assert busy == ring.num_busy == len(filling) + len(reading) + len(ring)
    if overflow == "block":
        assert ring.dropped_steps == 0
