"""One attempt on its way from what its trainer writes to journal, series and followers.

Owns every reader and writer of the attempt and is driven by one thread at a time. Everything it knows can be thrown
away at any moment: a new feed goes on from the last commit of the series and the last line of the journal.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from palaestra.files.run_directory import Attempt
from palaestra.runs.ingest.grammar import tracking_url
from palaestra.runs.ingest.output_watch import OutputWatch
from palaestra.runs.ingest.tags import provenance
from palaestra.runs.ingest.translator import Counts, Translator
from palaestra.runs.record import MAX_INTEGER
from palaestra.runs.runner import JournalFile, Source
from palaestra.runs.series.commits import SeriesLock
from palaestra.runs.series.reader import SeriesReader
from palaestra.runs.series.writer import SeriesWriter
from palaestra.runs.state.progress import AttemptProgress, NonFiniteTracker
from palaestra.telemetry.event import (
    CheckpointSaved,
    EpisodeSummary,
    Frame,
    LogLine,
    PhaseChanged,
    Record,
    TrainingStep,
    UnknownEvent,
)
from palaestra.telemetry.journal import Cursor, JournalReader

__all__ = ["Feed"]

_FLUSH_EVERY_S = 0.5
_FLUSH_POINTS = 4_096
_FLUSH_POINTS_PER_METRIC = 64
"""Every metric has files of its own: of thousands, a flush is worth it only when each has several new points."""
_FLUSH_SHARE = 4
"""Time between two flushes, in times that the last one took."""
_RETURNS = 100
_COUNTED = ("env_step", "update", "episodes", "corrupt", "left_out", "unknown", "first_dropped", "said", "said_reason",
            "tracking_url")  # fmt: skip


@dataclass
class _Tally:
    """What is counted while records go by; stored with every commit."""

    env_step: int = 0
    update: int = 0
    episodes: int = 0
    corrupt: int = 0
    left_out: int = 0
    unknown: int = 0
    """Events of a kind or a schema that we do not know."""
    first_dropped: str = ""
    said: str = ""
    said_reason: str = ""
    tracking_url: str = ""
    non_finite: NonFiniteTracker = field(default_factory=NonFiniteTracker)
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=_RETURNS))

    @classmethod
    def read(cls, data: dict[str, Any]) -> _Tally:
        known = {name: data[name] for name in _COUNTED if name in data}
        return cls(**known, non_finite=NonFiniteTracker(data.get("non_finite", ())))

    def plain(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in _COUNTED}, "non_finite": self.non_finite.to_json()}

    def take(self, records: list[Record]) -> None:
        for seq, _, event in records:
            if isinstance(event, TrainingStep):
                self.update = max(self.update, event.update)
                self.non_finite.update(event.env_step, event.metrics)
            elif isinstance(event, EpisodeSummary):
                self.episodes += 1
                self.returns.append(event.episode_return)
                self.non_finite.update(event.env_step, {"episode/return": event.episode_return})
            elif isinstance(event, PhaseChanged):
                self.said, self.said_reason = event.phase, event.reason
                continue
            elif isinstance(event, LogLine):
                self.tracking_url = tracking_url(event.text) or self.tracking_url
                continue
            elif isinstance(event, UnknownEvent):
                self.unknown += 1
                reason = f"event {seq}: unknown kind {event.kind[:80]!r} of schema {event.schema}"
                self.first_dropped = self.first_dropped or reason
                continue
            elif not isinstance(event, CheckpointSaved | Frame):
                continue
            if event.env_step <= MAX_INTEGER:
                self.env_step = max(self.env_step, event.env_step)

    def mean_return(self) -> float | None:
        return sum(self.returns) / len(self.returns) if self.returns else None


class Feed:
    """Reads one attempt on. Not safe for two threads at once; a second feed of the attempt raises `SeriesBusy`."""

    def __init__(
        self,
        attempt: Attempt,
        sources: tuple[Source, ...],
        thin_every: int = 1,
        clock: Callable[[], float] = time.monotonic,
        *,
        translate: bool = True,
    ) -> None:
        self._attempt = attempt
        self._sources = sources
        self._clock = clock
        self.more = False
        """The last turn ended because it was long enough, not because there was nothing left."""
        self.began_again = False
        """The journal turned out to be another file, whose records are numbered anew."""
        self._reader = JournalReader(attempt.journal)
        self._translator: Translator | None = None
        self._lock = SeriesLock(attempt)
        try:
            if translate and sources and not any(isinstance(source, JournalFile) for source in sources):
                self._translator = Translator(attempt, sources, thin_every)
            self._go_on()
        except BaseException:
            self.close()
            raise

    def _go_on(self) -> None:
        """From the last commit."""
        self._series = self._open_series()
        self._reader = JournalReader(self._attempt.journal, self._series.cursor)
        self._tally = _Tally.read(self._series.tally)
        self._corrupt_before, self._left_out_before = self._tally.corrupt, self._tally.left_out
        recent = SeriesReader(self._attempt.series).recent("episode/return", _RETURNS)
        self._tally.returns.extend(point.value for point in recent)
        self._output = OutputWatch(self._attempt.stdout)
        self._flushed, self._flush_took = self._clock(), 0.0
        # Before a line is added: a journal that lost its end must not grow back over the cursor unnoticed.
        self._read(0)

    def turn(self, limit: int) -> list[Record]:
        """Take at most `limit` further records through; those that were read."""
        translated = self._translator.pump(limit) if self._translator else 0
        records = self._read(limit)
        self.more = self._reader.more or translated >= limit
        self._output.look()
        late = self._clock() - self._flushed >= max(_FLUSH_EVERY_S, _FLUSH_SHARE * self._flush_took)
        if self._many_wait() or late:
            self._flush()
        return records

    def finish(self, limit: int) -> list[Record]:
        """The same after the trainer has ended. Once there is no `more`, everything is on disk."""
        records = self._read(limit)
        while not records and self._translator and self._translator.pump(limit, final=True):
            records = self._read(limit)
        if not records:
            # The end of the output may complete an episode or a line, which is no further item.
            records = self._read(limit)
        self.more = bool(records)
        if self._many_wait():
            self._flush()
        if not records:
            self._output.look(to_end=True)
            self._flush(durable=True)
        return records

    def catch_up(self, limit: int) -> None:
        """Take everything through that is there by now."""
        while self._read(limit):
            if self._many_wait():
                self._flush()
        self._flush()

    def progress(self) -> AttemptProgress:
        """How far it has come."""
        tally = self._tally
        counts = self._translator.counts if self._translator else Counts()
        translated_bytes = self._translator.read_bytes() if self._translator else 0
        return AttemptProgress(
            attempt=self._attempt.number,
            seq=self._reader.cursor.seq,
            env_step=tally.env_step,
            update=tally.update,
            episodes=tally.episodes,
            episode_return=tally.mean_return(),
            said=tally.said,
            said_reason=tally.said_reason,
            output_bytes=self._output.size,
            source_bytes=self._reader.cursor.offset + translated_bytes,
            tracebacks=self._output.tracebacks,
            corrupt=tally.corrupt + counts.corrupt,
            unread_lines=counts.unread_lines,
            episode_lines=counts.episode_lines,
            tracking_url=counts.tracking_url or tally.tracking_url,
            points_left_out=tally.left_out,
            dropped=counts.dropped + counts.corrupt + tally.corrupt + tally.unknown,
            first_dropped=counts.first_dropped or tally.first_dropped,
            non_finite=tally.non_finite.current(),
        )

    def close(self) -> None:
        """Release files; what no flush has taken is read again by the next feed."""
        self._reader.close()
        if self._translator:
            self._translator.close()
        self._lock.close()

    def _read(self, limit: int) -> list[Record]:
        records = self._reader.read(limit)
        if self._reader.restarts:
            # Another file under the same name: what the series holds is of the old one.
            self._begin_again()
            records = self._reader.read(limit)
        self._tally.take(records)
        self._tally.corrupt = self._corrupt_before + self._reader.corrupt_lines
        if self._reader.first_corrupt and not self._tally.first_dropped:
            self._tally.first_dropped = f"{self._attempt.journal.name}, {self._reader.first_corrupt}"
        self._series.add(records)
        self._tally.left_out = self._left_out_before + self._series.left_out
        return records

    def _flush(self, *, durable: bool = False) -> None:
        began = self._clock()
        self._series.flush(self._reader.cursor, self._tally.plain(), durable=durable)
        self._flushed = self._clock()
        self._flush_took = self._flushed - began

    def _many_wait(self) -> bool:
        return self._series.waiting >= max(_FLUSH_POINTS, _FLUSH_POINTS_PER_METRIC * self._series.columns)

    def _open_series(self) -> SeriesWriter:
        return SeriesWriter(self._attempt.series, lambda name: provenance(self._sources, name))

    def _begin_again(self) -> None:
        (self._attempt.series / "commits.log").unlink(missing_ok=True)
        self._series = self._open_series()
        self._reader.close()
        self._reader = JournalReader(self._attempt.journal, Cursor())
        self._tally = _Tally()
        self.began_again = True
        self._corrupt_before = self._left_out_before = 0
