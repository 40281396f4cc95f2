"""Episodes begin only when they can be learned from in time."""

from hypothesis import given
from hypothesis import strategies as st

from palaestra.actor.episode_source import free_slots


def test_with_no_staleness_one_batch_is_under_way_and_no_more():
    bounds = {"concurrent": 100, "batch_size": 8, "max_staleness": 0}
    assert free_slots(running=0, accepted=0, version=0, **bounds) == 8
    assert free_slots(running=5, accepted=0, version=0, **bounds) == 3
    assert free_slots(running=0, accepted=8, version=0, **bounds) == 0
    assert free_slots(running=0, accepted=8, version=1, **bounds) == 8


def test_a_staleness_of_2_allows_two_batches_more():
    assert free_slots(running=0, accepted=0, version=0, concurrent=100, batch_size=8, max_staleness=2) == 24


def test_room_bounds_it_too():
    assert free_slots(running=3, accepted=0, version=0, concurrent=4, batch_size=8, max_staleness=2) == 1
    assert free_slots(running=6, accepted=0, version=0, concurrent=4, batch_size=8, max_staleness=2) == 0


def test_after_a_resume_at_version_50_no_burst_begins():
    bounds = {"concurrent": 1000, "batch_size": 8, "max_staleness": 1}
    assert free_slots(running=0, accepted=50 * 8, version=50, **bounds) == 16
    assert free_slots(running=0, accepted=0, version=50, **bounds) == 416  # what counting from nothing would do


@given(st.integers(1, 32), st.integers(1, 16), st.integers(0, 4), st.data())
def test_episodes_that_end_in_the_order_they_began_are_learned_from_in_time(concurrent, batch, max_staleness, data):
    bounds = {"concurrent": concurrent, "batch_size": batch, "max_staleness": max_staleness}
    version, running, waiting, accepted = 0, [], [], 0
    for _ in range(60):
        begun = free_slots(running=len(running), accepted=accepted, version=version, **bounds)
        running += [version] * begun
        if running:
            waiting.append(running.pop(0))
            accepted += 1
        if len(waiting) >= batch and data.draw(st.booleans()):
            learned, waiting = waiting[:batch], waiting[batch:]
            assert all(version - acted <= max_staleness for acted in learned)
            version += 1
