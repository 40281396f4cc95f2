"""Ingests one attempt: from the files of its trainer to journal, series and followers.

A feed owns every reader and writer of the attempt and is used by one thread at a time. It can be discarded at any
moment: a new feed continues from the last commit of the series and the last line of the journal.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from palaestra.files.run_directory import Attempt
from palaestra.processes.procfs import boot_id
from palaestra.runs.ingest.stdout import OutputScanner
from palaestra.runs.ingest.trainer_formats import find_tracking_url, provenance
from palaestra.runs.ingest.translation_state import TranslationCounts
from palaestra.runs.ingest.translator import Translator
from palaestra.runs.record import MAX_INTEGER
from palaestra.runs.runner import JournalFile, Source
from palaestra.runs.series.files import SeriesBusy, SeriesLock, read_last_commit
from palaestra.runs.series.reader import SeriesReader
from palaestra.runs.series.writer import SeriesWriter
from palaestra.runs.state.attempt_files import AttemptPlan
from palaestra.runs.state.progress import AttemptProgress, NonFiniteTracker
from palaestra.runs.wire import JsonObject, upgrade_names
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

_FLUSH_EVERY_S = 0.5
_FLUSH_POINTS = 4_096
_FLUSH_POINTS_PER_METRIC = 64
"""Each metric has its own files, so with thousands of metrics a flush pays off only with several new points each."""
_FLUSH_PAUSE = 4
"""Minimum time between two flushes, as a multiple of the duration of the last one."""
_RETURNS = 100
_BATCH = 10_000
_RETRY_EVERY_S = 0.02


@dataclass
class _Tally:
    """Counters over all records of the attempt; stored with every commit."""

    env_step: int = 0
    update: int = 0
    episodes: int = 0
    corrupt: int = 0
    left_out: int = 0
    unknown: int = 0
    """Events of an unknown kind or schema."""
    first_dropped: str = ""
    reported_phase: str = ""
    """The last phase reported by the trainer."""
    tracking_url: str = ""
    non_finite: NonFiniteTracker = field(default_factory=NonFiniteTracker)
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=_RETURNS))

    @classmethod
    def from_json(cls, data: JsonObject) -> _Tally:
        data = upgrade_names(data)
        stored = {one.name: data[one.name] for one in fields(cls) if one.name in data}
        return cls(**{**stored, "non_finite": NonFiniteTracker(data.get("non_finite", ()))})

    def to_json(self) -> JsonObject:
        # The last returns are read from the series.
        counters = {name: value for name, value in vars(self).items() if name != "returns"}
        return {**counters, "non_finite": self.non_finite.to_json()}

    def add(self, records: list[Record]) -> None:
        for seq, _, event in records:
            if isinstance(event, TrainingStep):
                self.update = max(self.update, event.update)
                self.non_finite.update(event.env_step, event.metrics)
            elif isinstance(event, EpisodeSummary):
                self.episodes += 1
                self.returns.append(event.episode_return)
                self.non_finite.update(event.env_step, {"episode/return": event.episode_return})
            elif isinstance(event, PhaseChanged):
                self.reported_phase = event.phase
                continue
            elif isinstance(event, LogLine):
                self.tracking_url = find_tracking_url(event.text) or self.tracking_url
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


class Feed:
    """Ingests one attempt. Not thread-safe; a second feed of the same attempt raises `SeriesBusy`."""

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
        self.has_more = False
        """The last call stopped at its limit, with input left."""
        self.restarted = False
        """The journal was replaced by another file, whose records are numbered from 1 again."""
        self._reader = JournalReader(attempt.journal)
        self._translator: Translator | None = None
        self._lock = SeriesLock(attempt)
        try:
            if translate and sources and not any(isinstance(source, JournalFile) for source in sources):
                self._translator = Translator(attempt, sources, thin_every)
            self._resume()
        except BaseException:
            self.close()
            raise

    def _resume(self) -> None:
        """Continue from the last commit."""
        self._series = self._open_series()
        self._reader = JournalReader(self._attempt.journal, self._series.cursor)
        self._tally = _Tally.from_json(self._series.tally)
        self._corrupt_before, self._left_out_before = self._tally.corrupt, self._tally.left_out
        recent = SeriesReader(self._attempt.series).recent("episode/return", _RETURNS)
        self._tally.returns.extend(point.value for point in recent)
        self._output = OutputScanner(self._attempt.stdout)
        self._flushed_at, self._flush_duration = self._clock(), 0.0
        # Before the translator appends: a journal that lost its end must not grow past the cursor unnoticed.
        self._read(0)

    def advance(self, limit: int) -> list[Record]:
        """Ingest at most `limit` further records and return them."""
        translated = self._translator.pump(limit) if self._translator else 0
        records = self._read(limit)
        self.has_more = self._reader.more or translated >= limit
        self._output.scan()
        pause = max(_FLUSH_EVERY_S, _FLUSH_PAUSE * self._flush_duration)
        if self._has_many_points() or self._clock() - self._flushed_at >= pause:
            self._flush()
        return records

    def finish(self, limit: int) -> list[Record]:
        """Like `advance`, after the trainer has ended. Once `has_more` is False, everything is on disk."""
        records = self._read(limit)
        while not records and self._translator and self._translator.pump(limit, final=True):
            records = self._read(limit)
        if not records:
            # The last call may have completed an episode or a line without reading another item.
            records = self._read(limit)
        self.has_more = bool(records)
        if self._has_many_points():
            self._flush()
        if not records:
            self._output.scan(to_end=True)
            self._flush(durable=True)
        return records

    def flush(self) -> None:
        """Write everything that was ingested to the stored series."""
        self._flush()

    def catch_up(self, limit: int) -> None:
        """Ingest everything that is in the journal by now, in batches of `limit`."""
        while self._read(limit):
            if self._has_many_points():
                self._flush()
        self._flush()

    def progress(self) -> AttemptProgress:
        """Return the progress of the attempt."""
        tally = self._tally
        counts = self._translator.counts if self._translator else TranslationCounts()
        translated_bytes = self._translator.bytes_read() if self._translator else 0
        return AttemptProgress(
            attempt=self._attempt.number,
            seq=self._reader.cursor.seq,
            env_step=tally.env_step,
            update=tally.update,
            episodes=tally.episodes,
            episode_return=sum(tally.returns) / len(tally.returns) if tally.returns else None,
            reported_phase=tally.reported_phase,
            output_bytes=self._output.size,
            source_bytes=self._reader.cursor.offset + translated_bytes,
            tracebacks=self._output.tracebacks,
            corrupt=tally.corrupt + counts.corrupt,
            episode_lines=counts.episode_lines,
            tracking_url=counts.tracking_url or tally.tracking_url,
            points_left_out=tally.left_out,
            dropped=counts.dropped + counts.corrupt + tally.corrupt + tally.unknown,
            first_dropped=counts.first_dropped or tally.first_dropped,
            non_finite=tally.non_finite.current(),
        )

    def close(self) -> None:
        """Close the files; records that were not flushed are read again by the next feed."""
        self._reader.close()
        if self._translator:
            self._translator.close()
        self._lock.close()

    def _read(self, limit: int) -> list[Record]:
        records = self._reader.read(limit)
        if self._reader.restarts:
            self._restart()
            records = self._reader.read(limit)
        self._tally.add(records)
        self._tally.corrupt = self._corrupt_before + self._reader.corrupt_lines
        if self._reader.first_corrupt and not self._tally.first_dropped:
            self._tally.first_dropped = f"{self._attempt.journal.name}, {self._reader.first_corrupt}"
        self._series.add(records)
        self._tally.left_out = self._left_out_before + self._series.left_out
        return records

    def _flush(self, *, durable: bool = False) -> None:
        started = self._clock()
        self._series.flush(self._reader.cursor, self._tally.to_json(), durable=durable)
        self._flushed_at = self._clock()
        self._flush_duration = self._flushed_at - started

    def _has_many_points(self) -> bool:
        return self._series.waiting >= max(_FLUSH_POINTS, _FLUSH_POINTS_PER_METRIC * self._series.columns)

    def _open_series(self) -> SeriesWriter:
        return SeriesWriter(self._attempt.series, self._find_origin)

    def _find_origin(self, name: str) -> str:
        origin = self._translator.find_origin(name) if self._translator else ""
        return origin or provenance(self._sources, name)

    def _restart(self) -> None:
        """Discard the series: the journal was replaced by another file."""
        (self._attempt.series / "commits.log").unlink(missing_ok=True)
        self._series = self._open_series()
        self._reader.close()
        self._reader = JournalReader(self._attempt.journal, Cursor())
        self._tally = _Tally()
        self.restarted = True
        self._corrupt_before = self._left_out_before = 0


def update_series(attempt: Attempt, *, wait_s: float = 0.0) -> None:
    """Bring series that are missing or behind their journal up to date, for runs that no service ingests.

    The holder of the series lock does the work; others wait for it at most `wait_s`, then read what is there.
    Output and event files are not translated; only a service does that.
    """
    deadline = time.monotonic() + wait_s
    while _is_behind(attempt):
        try:
            feed = Feed(attempt, AttemptPlan.read(attempt).sources, translate=False)
        except SeriesBusy:
            if time.monotonic() >= deadline:
                return
            time.sleep(_RETRY_EVERY_S)
            continue
        except OSError:
            return  # no write permission, or a full disk: existing series can still be read
        try:
            feed.catch_up(_BATCH)
        except OSError:
            pass
        finally:
            feed.close()
        return


def _is_behind(attempt: Attempt) -> bool:
    try:
        size = attempt.journal.stat().st_size
    except OSError:
        return False
    commit = read_last_commit(attempt.series / "commits.log")
    if commit is None or not (commit.whole or commit.boot_id == boot_id()):
        return size > 0
    # A journal shorter than its cursor was damaged; then the series are all that is left.
    return size > commit.cursor.offset
