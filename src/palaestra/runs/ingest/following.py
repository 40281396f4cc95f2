"""A run as a stream: everything that happened and was measured, then what happens and is measured, each once.

What a follower has is one position; what it lacks comes from memory when that reaches back far enough, else from the
files, so a slow follower costs nobody anything. The stream ends when the run has ended and everything was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import NamedTuple

from palaestra.errors import ConfigError
from palaestra.files.run_directory import Attempt, RunDirectory
from palaestra.runs.ingest.ring import Ring
from palaestra.runs.record import RunEvent
from palaestra.runs.state.event_log import RunEventLog, current_phase
from palaestra.runs.state.unsupervised import read_unsupervised
from palaestra.telemetry.event import Record
from palaestra.telemetry.journal import JournalReader

__all__ = ["Position", "StreamItem", "follow", "replay"]

_AT_ONCE = 2000
_LOOK_EVERY_S = 0.5
"""For what nobody tells us about."""


class Position(NamedTuple):
    """How far a follower came: the last happening, and the last record of an attempt."""

    life: int = 0
    attempt: int = 0
    seq: int = 0

    @classmethod
    def read(cls, text: str) -> Position:
        """From `3.1.4711`; empty is the beginning. `ConfigError` for anything else."""
        if not text:
            return cls()
        words = text.split(".")
        if len(words) != 3 or not all(word.isascii() and word.isdecimal() and len(word) < 19 for word in words):
            raise ConfigError("after", text, "is not the id of an event", "Give the id of the last event you have")
        return cls(*map(int, words))

    def __str__(self) -> str:
        return f"{self.life}.{self.attempt}.{self.seq}"


class StreamItem(NamedTuple):
    """One thing that happened or was measured, and the position after it."""

    id: str
    item: Record | RunEvent


class _Reader:
    """Records of one attempt behind a number, from memory or from the file."""

    def __init__(self, attempt: Attempt, seq: int) -> None:
        self.number, self.seq = attempt.number, seq
        self._file = JournalReader(attempt.journal)

    async def next(self, ring: Ring | None) -> list[Record]:
        kept = ring.since((self.number, self.seq)) if ring is not None else None
        if kept is not None:
            records = [keyed.record for keyed in kept[:_AT_ONCE] if keyed.key[0] == self.number]
        else:
            records = []
            while True:
                block = await asyncio.to_thread(self._file.read, _AT_ONCE)
                records = [record for record in block if record.seq > self.seq]
                if records or not block:
                    break
        if records:
            self.seq = records[-1].seq
        return records

    def close(self) -> None:
        self._file.close()


async def follow(
    run: RunDirectory,
    after: str,
    ring: Callable[[], Ring | None],
    listen: Callable[[Callable[[], None]], Callable[[], None]],
) -> AsyncIterator[StreamItem]:
    """Replay what lies behind a position, then follow. `listen` has a callback called when something happens."""
    position = Position.read(after)
    loop, news = asyncio.get_running_loop(), asyncio.Event()
    deaf = [listen(news.set)]
    followed: Ring | None = None
    readers: dict[int, _Reader] = {}
    try:
        while True:
            news.clear()
            memory = ring()
            if memory is not None and memory is not followed:
                followed = memory
                deaf.append(memory.watch(lambda: _wake(loop, news)))
            # Looked at before anything is read: what was written by then is all there is. A run in somebody's hands is
            # not over, whatever its life says: its row may still be on the way, and who saw the end reads that next.
            over = memory is None and _over(run)
            async for reached, item in _pass(run, position, followed, readers):
                position = reached
                yield StreamItem(str(position), item)
            if over:
                return
            try:
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await news.wait()
            except TimeoutError:
                continue
    finally:
        for end in deaf:
            end()
        for reader in readers.values():
            reader.close()


async def replay(run: RunDirectory, after: str) -> AsyncIterator[StreamItem]:
    """What lies behind a position by now, from the files alone."""
    readers: dict[int, _Reader] = {}
    try:
        async for position, item in _pass(run, Position.read(after), None, readers):
            yield StreamItem(str(position), item)
    finally:
        for reader in readers.values():
            reader.close()


def _wake(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
    # The publishing thread may come after the loop is gone; then nobody is left to wake.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(news.set)


async def _pass(
    run: RunDirectory, position: Position, memory: Ring | None, readers: dict[int, _Reader]
) -> AsyncIterator[tuple[Position, Record | RunEvent]]:
    life, attempt, seq = position
    happenings = RunEventLog(run).read(after=life)
    for paths in run.attempts():
        number = paths.number
        if number < attempt:
            continue
        for record in _before_end_of(number, happenings):
            life = record.seq
            yield Position(life, attempt, seq), record
        if number > attempt:
            attempt, seq = number, 0
        reader = readers.setdefault(number, _Reader(paths, seq))
        while records := await reader.next(memory):
            for one in records:
                seq = one.seq
                yield Position(life, attempt, seq), one
    for record in happenings:
        yield Position(record.seq, attempt, seq), record


def _before_end_of(number: int, happenings: list[RunEvent]) -> Iterator[RunEvent]:
    """Take off the front what came before the attempt's end, so that the end comes after what was measured."""
    while happenings:
        first = happenings[0]
        if first.attempt > number or (first.attempt == number and first.phase.has_ended):
            return
        yield happenings.pop(0)


def _over(run: RunDirectory) -> bool:
    if run.spec.exists():
        return current_phase(RunEventLog(run).read()).has_ended
    record = read_unsupervised(run)
    return record is None or record.phase.has_ended
