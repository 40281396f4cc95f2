"""The arrow from learner to actor: published weights with version numbers, read without ever being torn.

The board keeps the last `depth` versions. The writer announces a version before it touches the memory and makes it the
newest only when it is whole; a reader copies, then looks whether the writer had come round to that memory meanwhile,
and if so copies again. Nobody waits for anybody, so a reader that is killed leaves no lock behind. Knows nothing of
policies: it carries arrays of fixed shapes, from one writer to any number of readers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from palaestra.errors import ExperienceError

__all__ = ["BoardPublisher", "ReadableWeights", "WeightBoard"]

WRITING, NEWEST = 0, 1


class WeightBoard:
    """The last `depth` published versions of a list of arrays."""

    def __init__(
        self,
        like: Sequence[NDArray[Any]],
        depth: int = 2,
        *,
        memory: Callable[[tuple[int, ...], Any], NDArray[Any]] = np.zeros,
    ) -> None:
        """`memory` gives zeroed arrays; laid over the same shared memory by two processes, it is one board."""
        if depth < 2:
            raise ExperienceError(f"WeightBoard: depth {depth} leaves nothing to read while it is written. Use 2.")
        self.depth = depth
        # Counted from 1, so that untouched memory says that nothing was published.
        self._state = memory((2,), np.int64)
        self._versions = [[memory(array.shape, array.dtype) for array in like] for _ in range(depth)]

    @property
    def newest(self) -> int:
        """The newest whole version; -1 before the first."""
        return int(self._state[NEWEST]) - 1

    def publish(self, version: int, arrays: Sequence[NDArray[Any]]) -> None:
        """Make a copy of `arrays` the newest version. Versions only grow."""
        if version <= self.newest:
            raise ExperienceError(f"WeightBoard.publish: version {version} is not newer than {self.newest}.")
        board = [array.shape for array in self._versions[0]]
        given = [array.shape for array in arrays]
        if given != board:
            raise ExperienceError(
                f"WeightBoard.publish: the weights have other sizes than those on the board ({given}, not {board}). "
                "Thaw or replace layers between two calls of train(), not while a background collector runs."
            )
        self._state[WRITING] = version + 1
        _fence()
        for target, array in zip(self._versions[version % self.depth], arrays, strict=True):
            np.copyto(target, array)
        _fence()
        self._state[NEWEST] = version + 1

    def clear(self) -> None:
        """Forget every version; only while nobody reads."""
        self._state[:] = 0

    def read_into(self, targets: Sequence[NDArray[Any]], version: int | None = None) -> int:
        """Copy the newest version, or exactly the one asked for, and say which it was."""
        while True:
            wanted = self.newest if version is None else version
            if wanted < 0 or wanted > self.newest:
                raise ExperienceError(f"WeightBoard.read_into: version {wanted} is not published yet.")
            _fence()
            for target, array in zip(targets, self._versions[wanted % self.depth], strict=True):
                np.copyto(target, array)
            _fence()
            # The writer announces itself before its first byte, so whoever finds no announcement has clean bytes.
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
        """The arrays as they are, in place where possible."""


class BoardPublisher:
    """Publishes on a board, which may be replaced while nobody reads it."""

    def __init__(self, board: WeightBoard | None = None) -> None:
        self.board = board

    def publish(self, version: int, weights: ReadableWeights) -> None:
        """Copy the weights onto the board, unless it has this version already."""
        assert self.board is not None
        if version > self.board.newest:
            self.board.publish(version, weights.read())

    def close(self) -> None:
        """The board belongs to its readers."""


def _fence() -> None:
    """Keep what comes before from being seen after what follows, on processors that reorder (ARM) as well."""
    # Letting go of one lock and taking the next is a full barrier; either alone orders one direction.
    with threading.Lock():
        pass
    with threading.Lock():
        pass
