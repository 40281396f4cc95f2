"""Weights from the learner to the actors: `WeightPublisher`, and `WeightBoard` for actors with their own copy.

The board keeps the last `depth` versions of a list of arrays. The writer announces a version before it writes to the
memory and marks it as the newest after the last byte. A reader copies, then checks whether the writer has reached the
same memory in the meantime, and copies again if so. Neither side takes a lock, so a killed reader blocks nothing. There
is one writer and any number of readers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from palaestra.errors import ExperienceError

W_contra = TypeVar("W_contra", contravariant=True)
WRITING, NEWEST = 0, 1


class WeightPublisher(Protocol[W_contra]):
    """Makes new weights available to the actors. A subclass inherits `close`."""

    def publish(self, version: int, weights: W_contra) -> None:
        """Act with these weights, known as `version`, from the next step or reply on.

        `weights` are the learner's own memory, so a publisher copies what it keeps. A version that is not newer than
        the last one changes nothing.
        """

    def close(self) -> None:
        """Release resources. May be called repeatedly. By default nothing."""
        return


class SharedWeights(WeightPublisher[Any]):
    """Publisher for actors that read the learner's own weights: every update takes effect immediately."""

    def publish(self, version: int, weights: Any) -> None:
        """Do nothing: the actors read the same memory."""


class WeightBoard:
    """The last `depth` published versions of a list of arrays."""

    def __init__(
        self,
        like: Sequence[NDArray[Any]],
        depth: int = 2,
        *,
        memory: Callable[[tuple[int, ...], Any], NDArray[Any]] = np.zeros,
    ) -> None:
        """`memory` allocates zeroed arrays. Two processes that pass the same shared memory share one board."""
        if depth < 2:
            raise ExperienceError(f"WeightBoard: depth {depth} leaves nothing to read while it is written. Use 2.")
        self.depth = depth
        # Versions are stored plus one, so that zeroed memory means that nothing was published.
        self._state = memory((2,), np.int64)
        # The same memory; readers ask for the newest version before every step, and an array would be slower to read.
        self._numbers = self._state.data
        self._versions = [[memory(array.shape, array.dtype) for array in like] for _ in range(depth)]

    @property
    def newest(self) -> int:
        """The newest complete version; -1 before the first."""
        newest: int = self._numbers[NEWEST]
        return newest - 1

    def publish(self, version: int, arrays: Sequence[NDArray[Any]]) -> None:
        """Make a copy of `arrays` the newest version. Versions must increase."""
        if version <= self.newest:
            raise ExperienceError(f"WeightBoard.publish: version {version} is not newer than {self.newest}.")
        expected = [array.shape for array in self._versions[0]]
        shapes = [array.shape for array in arrays]
        if shapes != expected:
            raise ExperienceError(
                f"WeightBoard.publish: the weights have shapes {shapes}, and the board has {expected}. "
                "Unfreeze or replace layers between two calls of train(), not during asynchronous collection."
            )
        self._state[WRITING] = version + 1
        _fence()
        for target, array in zip(self._versions[version % self.depth], arrays, strict=True):
            np.copyto(target, array)
        _fence()
        self._state[NEWEST] = version + 1

    def clear(self) -> None:
        """Remove every version. There must be no reader."""
        self._state[:] = 0

    def read_into(self, targets: Sequence[NDArray[Any]], version: int | None = None) -> int:
        """Copy the newest version, or exactly `version`, into `targets`; returns the version copied."""
        while True:
            wanted = self.newest if version is None else version
            if wanted < 0 or wanted > self.newest:
                raise ExperienceError(f"WeightBoard.read_into: version {wanted} is not published yet.")
            _fence()
            for target, array in zip(targets, self._versions[wanted % self.depth], strict=True):
                np.copyto(target, array)
            _fence()
            # The writer announces a version before its first byte: without an announcement the copy is consistent.
            if int(self._state[WRITING]) - 1 < wanted + self.depth:
                return wanted
            if version is not None:
                raise ExperienceError(
                    f"WeightBoard.read_into: version {version} was replaced; the board keeps {self.depth}, up to "
                    f"{self.newest}. Make it deeper."
                )


class ReadableWeights(Protocol):
    """Weights as arrays of fixed shapes."""

    def read(self) -> Sequence[NDArray[Any]]:
        """The arrays, without copying where possible."""


class BoardPublisher(WeightPublisher[ReadableWeights]):
    """Publishes on a board, which belongs to its readers and may be replaced while it has none."""

    def __init__(self, board: WeightBoard | None = None) -> None:
        self.board = board

    def publish(self, version: int, weights: ReadableWeights) -> None:
        """Copy the weights to the board unless it already has this version."""
        assert self.board is not None
        if version > self.board.newest:
            self.board.publish(version, weights.read())


def _fence() -> None:
    """Full memory barrier, also on processors that reorder stores (ARM)."""
    # Releasing one lock and acquiring the next is a full barrier; either alone orders one direction.
    with threading.Lock():
        pass
    with threading.Lock():
        pass
