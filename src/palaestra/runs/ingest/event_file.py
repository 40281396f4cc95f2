"""Whole records of a TensorBoard event file that somebody is still writing.

A record is its length, a checksum of the length, the payload and a checksum of the payload. One that is not all there
yet is waited for. Damage is stepped over: the next place where eight bytes and their checksum agree is where records
go on, so a flipped bit costs the record it is in and not, as elsewhere, all that follow.
"""

from __future__ import annotations

import os
import struct
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from palaestra.runs.ingest.crc32c import masked

__all__ = ["EventFileTail", "Framed"]

_HEADER = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_AROUND = _HEADER.size + _CHECKSUM.size
_BLOCK_BYTES = 1 << 20
_LONGEST = 1 << 20
"""Longer payloads are pictures, sounds or graphs: they are skipped unread."""
_ZEROS = bytes(5)


@lru_cache(maxsize=1024)
def _of_length(length: int) -> int:
    """Its checksum; the records of a trainer come in few lengths."""
    return masked(length.to_bytes(8, "little"))


class Framed(NamedTuple):
    """One record's payload, and where in the file the record begins."""

    offset: int
    payload: bytes


class EventFileTail:
    """Reads on from `offset`; a file that shrank or was replaced begins anew."""

    def __init__(self, path: Path, offset: int = 0, inode: int = 0) -> None:
        self._path = path
        self._searching = False
        self.offset = offset
        """Where the next record begins."""
        self.inode = inode
        """Which file that is; 0 before the first read."""
        self.corruptions = 0
        """Damaged stretches that were stepped over."""

    def read(self, limit: int) -> list[Framed]:
        """The next whole records, at most `limit`."""
        try:
            fd = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return []
        try:
            facts = os.fstat(fd)
            if self.inode not in (0, facts.st_ino) or facts.st_size < self.offset:
                self.offset, self._searching = 0, False
            self.inode = facts.st_ino
            found: list[Framed] = []
            # A round that neither finds records nor moves on has met the end of what is written.
            while len(found) < limit and facts.st_size > self.offset:
                before = self.offset
                self._round(fd, facts.st_size, limit, found)
                if self.offset == before:
                    break
            return found
        finally:
            os.close(fd)

    def give_up(self) -> None:
        """Nobody writes any more: count what follows the last whole record as damage and step over it."""
        try:
            size = os.stat(self._path).st_size
        except FileNotFoundError:
            return
        if size > self.offset:
            self.corruptions += not self._searching
            self.offset, self._searching = size, False

    def _round(self, fd: int, size: int, limit: int, found: list[Framed]) -> None:
        start = self.offset
        block = os.pread(fd, _BLOCK_BYTES + _AROUND, start)
        at = 0
        while len(found) < limit and len(block) - at >= _HEADER.size:
            length, checksum = _HEADER.unpack_from(block, at)
            if _of_length(length) != checksum:
                at = self._search(block, at)
                continue
            self._searching = False
            end = at + _AROUND + length
            if length > _LONGEST:
                if start + end > size:
                    break
                self.offset = start + end
                return
            if end > len(block):
                break
            payload = block[at + _HEADER.size : end - _CHECKSUM.size]
            if masked(payload) != _CHECKSUM.unpack_from(block, end - _CHECKSUM.size)[0]:
                at = self._search(block, at)
                continue
            found.append(Framed(start + at, payload))
            at = end
        self.offset = start + at

    def _search(self, block: bytes, damaged: int) -> int:
        """Where in the block records may go on; at its end when nowhere."""
        if not self._searching:
            self.corruptions += 1
            self._searching = True
        at = damaged
        # The length of any record worth finding leaves five of its eight bytes zero.
        while (zeros := block.find(_ZEROS, at + 1 + 3)) >= 0:
            at = zeros - 3
            if len(block) - at < _HEADER.size:
                break
            length, checksum = _HEADER.unpack_from(block, at)
            if _of_length(length) == checksum:
                return at
        return max(damaged + 1, len(block) - _HEADER.size + 1)
