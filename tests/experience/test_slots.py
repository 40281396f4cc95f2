"""The ring's bookkeeping: a slot is never filled while it is read, and nothing is lost that is not counted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.errors import ExperienceError
from palaestra.experience.slots import Slots, SlotState


def test_a_slot_goes_round_and_is_free_again():
    slots = Slots(1)
    assert slots.claim() == 0
    assert slots.claim() is None
    slots.commit(0)
    assert slots.claim() is None  # full and unread: block
    assert slots.take() == 0
    assert slots.claim() is None  # being read
    slots.release(0)
    assert slots.claim() == 0


def test_overwriting_takes_the_oldest_unread_and_counts_it():
    slots = Slots(2, "overwrite_oldest")
    for slot in (0, 1):
        assert slots.claim() == slot
        slots.commit(slot)
    assert slots.claim() == 0
    assert slots.overwritten == 1
    slots.commit(0)
    assert [slots.take(), slots.take()] == [1, 0]  # oldest first


def test_overwriting_never_takes_what_is_being_read():
    slots = Slots(1, "overwrite_oldest")
    slots.claim()
    slots.commit(0)
    slots.take()
    assert slots.claim() is None
    assert slots.overwritten == 0


def test_what_was_put_back_is_the_oldest_again():
    slots = Slots(3)
    for _ in range(2):
        slots.commit(slots.claim())
    slots.requeue(slots.take())
    assert [slots.take(), slots.take()] == [0, 1]


@pytest.mark.parametrize("step", ["commit", "abandon", "release", "requeue"])
def test_a_step_out_of_order_is_refused(step):
    with pytest.raises(ExperienceError, match="slot 0 of the ring is free"):
        getattr(Slots(1), step)(0)


@given(
    st.integers(1, 4),
    st.sampled_from(["block", "overwrite_oldest"]),
    st.lists(st.sampled_from(["claim", "commit", "abandon", "take", "release", "requeue"]), max_size=60),
)
def test_every_segment_is_read_once_in_order_or_counted(count, overflow, steps):
    slots = Slots(count, overflow)
    filling: dict[int, int] = {}
    reading: dict[int, int] = {}
    contents: dict[int, int] = {}  # slot -> number of the segment committed in it
    committed = abandoned = claimed = 0
    read: list[int] = []
    for step in steps:
        if step == "claim":
            slot = slots.claim()
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
            else:
                abandoned += 1
            getattr(slots, step)(slot)
        elif step == "take":
            slot = slots.take()
            if slot is not None:
                reading[slot] = contents.pop(slot)
        elif step in ("release", "requeue") and reading:
            slot = next(reversed(reading))  # the last taken, so that order is kept when it goes back
            number = reading.pop(slot)
            if step == "release":
                read.append(number)
            else:
                contents[slot] = number
            getattr(slots, step)(slot)
    assert len(set(read)) == len(read)
    assert committed == len(read) + len(reading) + slots.num_full + slots.overwritten
    busy = sum(state is not SlotState.FREE for state in slots.states)
    assert busy == slots.num_busy == len(filling) + len(reading) + slots.num_full
    if overflow == "block":
        assert slots.overwritten == 0
