"""Published weights: whole or not at all, whoever reads them while they are written."""

import threading

import numpy as np
import pytest

from palaestra.errors import ExperienceError
from palaestra.transport.weights import WeightBoard

SIZE = 2_000_000
"""Large enough that copying takes longer than a thread's turn."""


class CarelessBoard(WeightBoard):
    """Reads without looking whether the writer came by: what the board would be without its check."""

    def read_into(self, targets, version=None):
        wanted = self.newest
        for target, array in zip(targets, self._versions[wanted % self.depth], strict=True):
            np.copyto(target, array)
        return wanted


def _torn_reads(board: WeightBoard) -> int:
    """How many of the reads, while versions were published as fast as possible, were not of one version, the named."""
    done = threading.Event()

    def publish():
        version, weights = 0, np.empty(SIZE, np.float32)
        while not done.is_set():
            version += 1
            weights[:] = version
            board.publish(version, [weights])

    board.publish(0, [np.zeros(SIZE, np.float32)])
    writer = threading.Thread(target=publish)
    writer.start()
    torn, mine = 0, np.empty(SIZE, np.float32)
    try:
        for _ in range(60):
            version = board.read_into([mine])
            # Whole, but another version than it is said to be, is wrong as well.
            torn += {float(mine.min()), float(mine.max())} != {float(version)}
    finally:
        done.set()
        writer.join()
    return torn


def test_a_read_is_never_torn_although_without_the_check_it_would_be():
    assert _torn_reads(WeightBoard([np.empty(SIZE, np.float32)])) == 0
    # The same threads on a board that does not look: proof that the test can fail.
    assert any(_torn_reads(CarelessBoard([np.empty(SIZE, np.float32)])) for _ in range(20))


def test_the_newest_whole_version_is_read_and_named():
    board, mine = WeightBoard([np.zeros(3)]), np.empty(3)
    assert board.newest == -1
    board.publish(4, [np.full(3, 4.0)])
    board.publish(5, [np.full(3, 5.0)])
    assert board.read_into([mine]) == 5
    assert mine.tolist() == [5.0, 5.0, 5.0]
    assert board.read_into([mine], version=4) == 4
    assert mine.tolist() == [4.0, 4.0, 4.0]


def test_what_was_published_is_a_copy():
    weights = np.ones(2)
    board, mine = WeightBoard([weights]), np.empty(2)
    board.publish(0, [weights])
    weights[:] = 9.0
    board.read_into([mine])
    assert mine.tolist() == [1.0, 1.0]


def test_versions_that_are_not_there_are_refused_by_name():
    board, mine = WeightBoard([np.zeros(1)]), np.empty(1)
    with pytest.raises(ExperienceError, match="version -1 is not published yet"):
        board.read_into([mine])
    for version in (1, 2, 3):
        board.publish(version, [np.zeros(1)])
    with pytest.raises(ExperienceError, match="version 1 was replaced; the board keeps 2"):
        board.read_into([mine], version=1)
    with pytest.raises(ExperienceError, match="version 7 is not published yet"):
        board.read_into([mine], version=7)
    with pytest.raises(ExperienceError, match="version 3 is not newer than 3"):
        board.publish(3, [np.zeros(1)])


def test_a_board_of_one_version_is_refused():
    with pytest.raises(ExperienceError, match="depth 1 leaves nothing to read"):
        WeightBoard([np.zeros(1)], depth=1)
