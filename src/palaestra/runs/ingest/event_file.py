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
from palaestra.runs.ingest.growing_file import GrowingFile

__all__ = ["EventFileTail", "Framed"]

_HEADER = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_AROUND = _HEADER.size + _CHECKSUM.size
_BLOCK_BYTES = 1 << 20
_BYTES_PER_READ = 1 << 22
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


class EventFileTail(GrowingFile):
    """The records of one event file; `offset` is where the next one begins."""

    def __init__(self, path: Path, offset: int = 0, inode: int = 0) -> None:
        super().__init__(path, offset, inode)
        self._searching = False
        self.corruptions = 0
        """Damaged stretches that were stepped over."""

    def read(self, limit: int) -> list[Framed]:
        """The next whole records, at most `limit` and a few megabytes."""
        found: list[Framed] = []
        last = self.offset + _BYTES_PER_READ
        with self.opened() as file:
            if file is None:
                return found
            fd, size = file
            # A round that neither finds records nor moves on has met the end of what is written.
            while len(found) < limit and last > self.offset and size > self.offset:
                before = self.offset
                self._round(fd, size, limit, found)
                if self.offset == before:
                    break
        return found

    def _began_anew(self) -> None:
        self._searching = False

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
