"""The experience queue: who may begin when, and how old experience can be when it is learned from."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palaestra.errors import CollectorFailed
from palaestra.experience import ArraySpec
from palaestra.experience.vla_buffer import VLABuffer
from palaestra.transport.queue import SegmentQueue

NUMBER = ArraySpec((), np.dtype(np.float32))


def _queue(max_staleness, segments=None, overflow="block", reproducible=False):
    ring = VLABuffer(segments or max_staleness + 1, 1, NUMBER, NUMBER, segment_length=1, overflow=overflow)
    return SegmentQueue(ring, max_staleness=max_staleness, reproducible=reproducible)


def _fill(queue, version):
    claim = queue.claim(0.0)
    if claim is None:
        return False
    queue.ring.segments[claim.slot].policy_version[:] = version if claim.version is None else claim.version
    queue.deliver(claim.slot, f"acted at {version}")
    return True


def test_staleness_0_takes_turns():
    queue = _queue(0)
    queue.open(0, 10)
    assert _fill(queue, 0)
    assert not _fill(queue, 0)  # the next one would act on weights that are about to change
    taken = queue.take(0, 0.0)
    assert not _fill(queue, 0)
    queue.release(taken.slot)
    assert _fill(queue, 1)


def test_staleness_1_lets_one_segment_be_collected_while_one_is_learned_from():
    queue = _queue(1)
    queue.open(0, 10)
    assert [_fill(queue, 0), _fill(queue, 0), _fill(queue, 0)] == [True, True, False]
    taken = queue.take(0, 0.0)
    assert taken.queue_depth == 1
    assert not _fill(queue, 0)  # one in hand, one waiting
    queue.release(taken.slot)
    assert _fill(queue, 1)


def test_a_larger_ring_does_not_loosen_the_bound():
    queue = _queue(1, segments=8)
    queue.open(0, 100)
    assert [_fill(queue, 0) for _ in range(4)] == [True, True, False, False]


def test_no_more_is_begun_than_will_be_learned_from():
    queue = _queue(3)
    queue.open(0, 2)
    assert [_fill(queue, 0) for _ in range(3)] == [True, True, False]
    queue.open(0, 3)  # what is unread counts
    assert [_fill(queue, 0) for _ in range(2)] == [True, False]


def test_a_segment_given_up_may_be_begun_again_and_its_steps_are_counted():
    queue = _queue(1)
    queue.open(0, 1)
    claim = queue.claim(0.0)
    queue.abandon(claim.slot, 5)
    assert queue.ring.dropped_steps == 5
    assert _fill(queue, 0)


def test_what_is_too_stale_is_dropped_and_counted_and_replaced():
    queue = _queue(1, segments=3, overflow="overwrite_oldest")
    queue.open(0, 3)
    for version in (0, 0, 2):
        assert _fill(queue, version)
    taken = queue.take(2, 0.0)  # two updates later the first two are two updates old
    assert queue.ring.segments[taken.slot].policy_version.tolist() == [2]
    assert queue.ring.dropped_steps == 2
    assert [_fill(queue, 2), _fill(queue, 2), _fill(queue, 2)] == [True, True, False]  # as many as were dropped


def test_what_is_overwritten_is_begun_again_elsewhere_so_that_the_learner_never_starves():
    queue = _queue(4, segments=2, overflow="overwrite_oldest")
    queue.open(0, 3)
    for _ in range(50):
        assert _fill(queue, 0)  # each begins in place of one that was lost
    assert queue.take(0, 0.0) is not None


def test_a_failure_wakes_whoever_waits_and_keeps_what_is_unread():
    queue = _queue(1)
    queue.open(0, 10)
    _fill(queue, 0)
    seen = []
    waiter = threading.Thread(target=lambda: seen.append(queue.claim(30.0)))
    _fill(queue, 0)
    waiter.start()
    queue.fail(CollectorFailed("the floor is wet"))
    waiter.join(10)
    assert seen == [None]
    assert queue.take(0, 30.0) is None  # at once, although two segments wait
    with pytest.raises(CollectorFailed, match="the floor is wet"):
        queue.raise_if_failed()
    queue.reopen()
    assert queue.take(0, 0.0) is not None


def test_put_back_comes_first_again():
    queue = _queue(1)
    queue.open(0, 10)
    _fill(queue, 0)
    _fill(queue, 0)
    taken = queue.take(0, 0.0)
    queue.requeue(taken.slot, "again")
    assert queue.take(0, 0.0).report == "again"


def test_a_segment_that_an_interrupted_learner_held_is_free_when_the_queue_opens_again():
    queue = _queue(0)
    queue.open(0, 10)
    assert _fill(queue, 0)
    assert queue.take(0, 0.0) is not None
    queue.open(0, 10)
    assert _fill(queue, 0)


def test_a_reproducible_collector_asks_for_no_weights_to_come_after_something_was_too_stale():
    queue = _queue(1, reproducible=True)
    queue.open(0, 1)
    assert _fill(queue, 0)
    queue.open(5, 10)
    assert queue.take(5, 0.0) is None  # acted at 0, and the learner has come to 5 on its own
    # The next two are learned from by updates 5 and 6, both at the bound of 1 or newer: 5 is all there is.
    assert [queue.claim(0.0).version, queue.claim(0.0).version] == [5, 5]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 4), st.booleans(), st.lists(st.sampled_from(["begin", "end", "take", "learned"]), max_size=80))
def test_whatever_the_timing_no_step_is_staler_than_the_bound(bound, reproducible, steps):
    queue = _queue(bound, reproducible=reproducible)
    queue.open(0, 1000)
    version, begun, taken = 0, [], None
    learned: list[int] = []
    for step in steps:
        if step == "begin" and len(begun) < 2:
            claim = queue.claim(0.0)
            if claim is not None:
                begun.append((claim.slot, version if claim.version is None else claim.version))
        elif step == "end" and begun:
            slot, acted = begun.pop(0)
            queue.ring.segments[slot].policy_version[:] = acted
            queue.deliver(slot, None)
        elif step == "take" and taken is None:
            taken = queue.take(version, 0.0)
            if taken is not None:
                acted = int(queue.ring.segments[taken.slot].policy_version[0])
                assert 0 <= version - acted <= bound
                if reproducible:
                    assert acted == max(0, version - bound)
                learned.append(acted)
        elif step == "learned" and taken is not None:
            version += 1
            queue.release(taken.slot)
            taken = None
    assert learned == sorted(learned)
    assert queue.ring.dropped_steps == 0
