"""Conformance checks for an `ExperienceSource` and a `WeightPublisher`.

Run these on your own implementation before training with it. They raise `AssertionError` naming the violated rule.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from palaestra.transport.source import ExperienceSource, SavedState, Timing
from palaestra.transport.weights import WeightPublisher


def check_source(make: Callable[[], ExperienceSource[Any]], *, requeues: bool = True) -> None:
    """`make` builds a source that is ready for its first batch, with the learner at version 0.

    `requeues`: the source returns a requeued batch again; otherwise it only subtracts the batch's steps.
    """
    source = make()
    try:
        for version in (1, 2):
            before = source.progress.steps
            batch = source.next_batch()
            assert batch is not None, "next_batch() returned None, although the source was not asked to stop"
            assert source.progress.steps >= before, "progress.steps must not decrease while batches are collected"
            source.raise_if_failed()
            source.release(batch, version)
            assert source.progress.updates == version, f"progress.updates must be {version} after as many releases"
            metrics = source.metrics(batch, Timing(0.5, 1.0))
            assert all(math.isfinite(number) for number in metrics.values()), "a metric is not finite"
        _check_requeue(source, requeues)
        _check_state(source.state())
        counters = source.progress.facts()
        fresh = make()
        try:
            fresh.progress.load(counters)
            exact = fresh.load_state(source.state())
            assert isinstance(exact, bool), "load_state must return whether the environments were restored exactly"
            assert fresh.progress.facts() == counters, "load_state must not change the progress counters"
        finally:
            fresh.close()
    finally:
        source.close()
        source.close()  # must be harmless


def _check_requeue(source: ExperienceSource[Any], requeues: bool) -> None:
    before, updates = source.progress.steps, source.progress.updates
    batch = source.next_batch()
    assert batch is not None, "next_batch() returned None, although the source was not asked to stop"
    source.requeue(batch)
    assert source.progress.updates == updates, "a requeued batch must not count as released"
    if requeues:
        again = source.next_batch()
        assert again is not None, "a requeued batch was not returned again"
        same = again.experience is batch.experience or again.experience == batch.experience
        assert same, "a requeued batch must be the next one"
        source.release(again, updates + 1)
    else:
        assert source.progress.steps == before, "the steps of a requeued batch must be subtracted from progress.steps"


def _check_state(state: SavedState) -> None:
    assert isinstance(state, SavedState), f"state() must return a SavedState, and returned {type(state).__name__}"
    assert all(isinstance(tensor, Tensor) for tensor in state.tensors.values()), "state().tensors must hold tensors"
    try:
        is_json = json.loads(json.dumps(state.facts)) == state.facts
    except (TypeError, ValueError):
        is_json = False
    assert is_json, "state().facts must be plain JSON"


def check_publisher(
    publisher: WeightPublisher[Any],
    weights: Callable[[], Any],
    change: Callable[[], None],
    read: Callable[[], tuple[int | None, Any]],
    *,
    copies: bool = True,
) -> None:
    """`read` returns the version and the weights of the actors; `change` changes the learner's weights in place.

    `copies`: the actors have their own copy; otherwise they read the learner's memory and have no version.
    """
    publisher.publish(1, weights())
    version, first = read()
    assert version in (1, None), f"version 1 was published, and the actors use version {version}"
    change()
    _, unpublished = read()
    assert (unpublished == first) == copies, (
        "the actors use weights that were not published" if copies else "the actors do not see an update"
    )
    publisher.publish(2, weights())
    version, second = read()
    assert version in (2, None), f"version 2 was published, and the actors use version {version}"
    assert second != first, "the actors did not receive the new weights"
    change()
    publisher.publish(2, weights())
    version, again = read()
    assert version in (2, None), "publishing the same version again must not change the version"
    assert not copies or again == second, "publishing the same version again must not change the weights"
    publisher.publish(1, weights())
    version, again = read()
    assert version in (2, None), "an older version must not replace a newer one"
    assert not copies or again == second, "an older version must not change the weights"
    publisher.close()
    publisher.close()  # must be harmless
