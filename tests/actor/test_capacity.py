"""Episodes begin only when they can be learned from in time."""

from hypothesis import given
from hypothesis import strategies as st

from palaestra.actor.capacity import Capacity


def test_with_no_staleness_one_batch_is_under_way_and_no_more():
    capacity = Capacity(concurrent=100, batch=8, max_staleness=0)
    assert capacity.free(running=0, accepted=0, version=0) == 8
    assert capacity.free(running=5, accepted=0, version=0) == 3
    assert capacity.free(running=0, accepted=8, version=0) == 0
    assert capacity.free(running=0, accepted=8, version=1) == 8


def test_a_staleness_of_2_allows_two_batches_more():
    assert Capacity(concurrent=100, batch=8, max_staleness=2).free(running=0, accepted=0, version=0) == 24


def test_room_bounds_it_too():
    assert Capacity(concurrent=4, batch=8, max_staleness=2).free(running=3, accepted=0, version=0) == 1
    assert Capacity(concurrent=4, batch=8, max_staleness=2).free(running=6, accepted=0, version=0) == 0


def test_after_a_resume_at_version_50_no_burst_begins():
    capacity = Capacity(concurrent=1000, batch=8, max_staleness=1)
    assert capacity.free(running=0, accepted=capacity.accepted_at(50), version=50) == 16
    assert capacity.free(running=0, accepted=0, version=50) == 416  # what counting from nothing would do


@given(st.integers(1, 32), st.integers(1, 16), st.integers(0, 4), st.data())
def test_episodes_that_end_in_the_order_they_began_are_learned_from_in_time(concurrent, batch, max_staleness, data):
    capacity = Capacity(concurrent, batch, max_staleness)
    version, running, waiting, accepted = 0, [], [], 0
    for _ in range(60):
        begun = capacity.free(running=len(running), accepted=accepted, version=version)
        running += [version] * begun
        if running:
            waiting.append(running.pop(0))
            accepted += 1
        if len(waiting) >= batch and data.draw(st.booleans()):
            learned, waiting = waiting[:batch], waiting[batch:]
            assert all(version - acted <= max_staleness for acted in learned)
            version += 1
