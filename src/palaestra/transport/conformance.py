"""Whether a source of experience and a publisher of weights keep what the training loop relies on.

Run these on your own before you train with them. They raise `AssertionError` with the broken rule.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from palaestra.transport.publisher import WeightPublisher
from palaestra.transport.source import Batch, ExperienceSource, SavedState, Timing, TrainingProgress

__all__ = ["ListSource", "check_publisher", "check_source"]


class ListSource:
    """A source of batches that are there already: for tests, and for experience that is read from disk."""

    def __init__(self, batches: Sequence[Any], *, steps: int = 1) -> None:
        """`steps`: what each batch counts."""
        self._batches, self._steps, self._position = list(batches), steps, 0
        self.progress = TrainingProgress()

    def next_batch(self) -> Batch[Any] | None:
        """The next one; None after the last."""
        if self._position == len(self._batches):
            return None
        self._position += 1
        self.progress.add(self._steps)
        return Batch(self._batches[self._position - 1], steps=self._steps)

    def release(self, batch: Batch[Any], version: int) -> None:
        """Count it."""
        self.progress.updates += 1

    def requeue(self, batch: Batch[Any]) -> None:
        """Give it again."""
        self._position -= 1
        self.progress.add(-self._steps)

    def raise_if_failed(self) -> None:
        """A list does not fail."""

    def metrics(self, batch: Batch[Any], timing: Timing) -> dict[str, float]:
        """How far it is."""
        return {"env_step": float(self.progress.steps)}

    def state(self) -> SavedState:
        """The position in the list."""
        return SavedState({}, {"position": self._position})

    def load_state(self, state: SavedState) -> bool:
        """Go on from there."""
        self._position = int(state.facts["position"])
        return True

    def close(self) -> None:
        """Nothing is held."""


def check_source(make: Callable[[], ExperienceSource[Any]], *, requeues: bool = True) -> None:
    """`make` gives a source that is ready for its first batch, the learner being at version 0.

    `requeues`: a batch that was not learned from comes again; a source that overwrites it only takes its steps back.
    """
    source = make()
    try:
        for version in (1, 2):
            before = source.progress.steps
            batch = source.next_batch()
            assert batch is not None, "a source that was not asked to stop gave no batch"
            assert source.progress.steps >= before, "progress.steps must not fall while batches are collected"
            source.raise_if_failed()
            source.release(batch, version)
            assert source.progress.updates == version, f"{version} batches were released and it counts another number"
            metrics = source.metrics(batch, Timing(0.5, 1.0))
            assert all(math.isfinite(number) for number in metrics.values()), "a metric is not finite"
        _check_requeue(source, requeues)
        _check_state(source.state())
        counted = source.progress.facts()
        fresh = make()
        try:
            fresh.progress.load(counted)
            exact = fresh.load_state(source.state())
            assert isinstance(exact, bool), "load_state must say whether the environments stand where they stood"
            assert fresh.progress.facts() == counted, "loading a state must not change what was counted"
        finally:
            fresh.close()
    finally:
        source.close()
        source.close()  # harmless when repeated


def _check_requeue(source: ExperienceSource[Any], requeues: bool) -> None:
    before, updates = source.progress.steps, source.progress.updates
    batch = source.next_batch()
    assert batch is not None, "a source that was not asked to stop gave no batch"
    source.requeue(batch)
    assert source.progress.updates == updates, "a batch that was requeued counts as released"
    if requeues:
        again = source.next_batch()
        assert again is not None, "what was requeued did not come again"
        assert again.experience is batch.experience or again.experience == batch.experience, "another batch came first"
        source.release(again, updates + 1)
    else:
        assert source.progress.steps == before, "steps of a batch that nobody learned from are counted"


def _check_state(state: SavedState) -> None:
    assert isinstance(state, SavedState), f"state() must give a SavedState, and gave a {type(state).__name__}"
    assert all(isinstance(tensor, Tensor) for tensor in state.tensors.values()), "a state's tensors must be tensors"
    try:
        survives = json.loads(json.dumps(state.facts)) == state.facts
    except (TypeError, ValueError):
        survives = False
    assert survives, "a state's facts must be plain JSON"


def check_publisher(
    publisher: WeightPublisher[Any],
    weights: Callable[[], Any],
    change: Callable[[], None],
    read: Callable[[], tuple[int | None, Any]],
    *,
    copies: bool = True,
) -> None:
    """`read` gives the version and the weights that act now; `change` makes the learner's weights others in place.

    `copies`: actors have weights of their own; otherwise they read the learner's memory and know no version.
    """
    publisher.publish(1, weights())
    version, first = read()
    assert version in (1, None), f"version 1 was published, and version {version} acts"
    change()
    _, unpublished = read()
    assert (unpublished == first) == copies, (
        "weights that were not published act" if copies else "an update is not seen"
    )
    publisher.publish(2, weights())
    version, second = read()
    assert version in (2, None), f"version 2 was published, and version {version} acts"
    assert second != first, "the new weights did not arrive"
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
    publisher.close()  # harmless when repeated
