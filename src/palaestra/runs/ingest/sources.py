"""The sources of the telemetry of one attempt: its output, its event files, and the file of `palaestra.log`.

A source reads a little further with every call and returns its position, from which another instance continues.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from palaestra.errors import ConfigError
from palaestra.runs.ingest.event_file import EventFileTail, EventRecord, parse_scalars
from palaestra.runs.ingest.stdout import MAX_LINE_BYTES, LineTail
from palaestra.runs.ingest.trainer_formats import (
    EPISODE_TAGS,
    OUTPUT_FORMATS,
    TAGS,
    EpisodePairing,
    PendingEpisode,
    find_tracking_url,
)
from palaestra.runs.ingest.translated_journal import Origin, TranslatedEvent
from palaestra.runs.ingest.translation_state import TranslationState
from palaestra.runs.runner import EventFiles, StdoutLines
from palaestra.runs.wire import JsonObject
from palaestra.telemetry.event import EpisodeSummary, LogLine, TrainingStep

T = TypeVar("T")

_FIND_FILES_EVERY_S = 0.5
_MAX_RECORDS = 4_000


class TelemetrySource(Protocol):
    """One source of an attempt."""

    def read(self, limit: int, events: list[TranslatedEvent], *, final: bool) -> int:
        """Read at most `limit` lines or records, append their events, and return the number of lines or records."""

    def state(self) -> JsonObject:
        """The position from which another instance continues."""

    def bytes_read(self) -> int:
        """Number of bytes read."""


class StdoutSource:
    """Reads stdout.log in an output format."""

    def __init__(self, path: Path, source: StdoutLines, state: JsonObject, shared: TranslationState) -> None:
        self._format = look_up(OUTPUT_FORMATS, source.format, "format")
        self._origin = Origin(f"stdout:{source.format}", path.name, 0)
        inode, offset = state.get("file", (0, 0))
        self._tail = LineTail(path, offset, inode)
        self._shared = shared

    def read(self, limit: int, events: list[TranslatedEvent], *, final: bool) -> int:
        """Read at most `limit` lines, append their events, and return the number of lines."""
        lines = self._tail.read(limit, final=final)
        counts, now = self._shared.counts, self._shared.clock()
        for text, offset, cut in lines:
            if not text.strip():
                continue
            if self._format.is_episode(text):
                counts.episode_lines += 1
            counts.tracking_url = find_tracking_url(text) or counts.tracking_url
            try:
                parsed = self._format.parse(text)
            except ValueError as error:
                reason = f"the line is longer than {MAX_LINE_BYTES:,} bytes" if cut else error
                counts.add_dropped(f"byte {offset} of {self._origin.file}", reason)
                continue
            if parsed is None:
                counts.unread_lines += 1
                continue
            for event in parsed:
                if isinstance(event, TrainingStep):
                    thinned = self._shared.thin_step(event)
                    if thinned is None:
                        continue
                    event = thinned
                elif isinstance(event, EpisodeSummary):
                    event = self._shared.number_episode(event)
                events.append(TranslatedEvent(event, self._origin._replace(offset=offset), now))
        return len(lines)

    def state(self) -> JsonObject:
        """The position from which another instance continues."""
        return {"file": [self._tail.inode, self._tail.offset]}

    def bytes_read(self) -> int:
        """Number of bytes read."""
        return self._tail.offset


class EventFileSource:
    """Reads TensorBoard files below the working directory, including those created later."""

    def __init__(self, work: Path, source: EventFiles, state: JsonObject, shared: TranslationState) -> None:
        self._work, self._pattern = work, source.pattern
        self._metric_names = look_up(TAGS, source.tags, "tag table")
        self._source = f"tensorboard:{source.tags}"
        self._shared = shared
        pending = state.get("pending")
        tags = EPISODE_TAGS.get(source.tags)
        self._pairing = EpisodePairing(tags, PendingEpisode(*pending) if pending else None) if tags else None
        self._tails: dict[str, EventFileTail] = {
            name: EventFileTail(work / name, offset, inode) for name, (inode, offset) in state.get("files", {}).items()
        }
        self._last_search = float("-inf")

    def read(self, limit: int, events: list[TranslatedEvent], *, final: bool) -> int:
        """Read at most `limit` records, append their events, and return the number of records."""
        now = time.monotonic()
        if final or now - self._last_search >= _FIND_FILES_EVERY_S:
            self._last_search = now
            self._find_files()
        limit = min(limit, _MAX_RECORDS)
        count = 0
        for name, tail in self._tails.items():
            before = tail.corruptions
            records = tail.read(limit - count)
            self._shared.counts.add_corrupt(
                f"byte {tail.offset} of {name}", "a damaged record before this was skipped", tail.corruptions - before
            )
            events.extend(self._translate(name, records))
            count += len(records)
            if count >= limit:
                break
        if final and count == 0:
            self._finish(events)
        return count

    def state(self) -> JsonObject:
        """The position from which another instance continues."""
        files = {name: [tail.inode, tail.offset] for name, tail in self._tails.items()}
        pending = self._pairing.pending if self._pairing else None
        return {"files": files, "pending": list(pending) if pending else None}

    def bytes_read(self) -> int:
        """Number of bytes read."""
        return sum(tail.offset for tail in self._tails.values())

    def _find_files(self) -> None:
        names = {str(path.relative_to(self._work)) for path in self._work.glob(self._pattern) if path.is_file()}
        # File names begin with their creation time; a trainer that restarts creates another file.
        for name in sorted(names - self._tails.keys(), key=lambda name: (Path(name).name, name)):
            self._tails[name] = EventFileTail(self._work / name)

    def _translate(self, file: str, records: list[EventRecord]) -> Iterator[TranslatedEvent]:
        """Translate records; consecutive scalars of one step become one `TrainingStep`."""
        metrics: dict[str, float] = {}
        origin, step, when = Origin(self._source, file, 0), 0, 0.0
        for offset, payload in records:
            try:
                record = parse_scalars(payload)
            except ValueError as error:
                self._shared.counts.add_corrupt(f"byte {offset} of {file}", error)
                continue
            here = Origin(self._source, file, offset)
            if record.session_start and record.step:
                text = f"the trainer restarted: earlier curves of {file} are void from step {record.step} on"
                yield TranslatedEvent(LogLine("warning", text), here, record.wall_time)
            if metrics and record.step != step:
                yield TranslatedEvent(TrainingStep(0, step, metrics), origin, when)
                metrics = {}
            for tag, value in record.values:
                episodes = self._pairing.add(tag, record.step, value, record.wall_time) if self._pairing else None
                if episodes is not None:
                    yield from self._episode_events(episodes, here)
                    continue
                name = self._metric_names.get(tag, tag)
                if not self._shared.thinning.keeps(name, record.step):
                    continue
                if name in metrics:
                    yield TranslatedEvent(TrainingStep(0, step, metrics), origin, when)
                    metrics = {}
                if not metrics:
                    origin, step = here, record.step
                metrics[name] = value
                when = record.wall_time
        if metrics:
            yield TranslatedEvent(TrainingStep(0, step, metrics), origin, when)

    def _episode_events(
        self, episodes: list[tuple[EpisodeSummary, float]], origin: Origin
    ) -> Iterator[TranslatedEvent]:
        for episode, ended in episodes:
            yield TranslatedEvent(self._shared.number_episode(episode), origin, ended)

    def _finish(self, events: list[TranslatedEvent]) -> None:
        """Complete the pending episode and count incomplete records, once the files are no longer written."""
        for name, tail in self._tails.items():
            before, place = tail.corruptions, f"byte {tail.offset} of {name}"
            tail.skip_rest()
            self._shared.counts.add_corrupt(place, "the last record is not complete", tail.corruptions - before)
        if self._pairing is not None and self._tails:
            name, tail = list(self._tails.items())[-1]
            events.extend(self._episode_events(self._pairing.flush(), Origin(self._source, name, tail.offset)))


def look_up(table: dict[str, T], name: str, what: str) -> T:
    """The entry of a table that a runner names. `ConfigError` if there is none."""
    try:
        return table[name]
    except KeyError:
        known = ", ".join(table)
        raise ConfigError(f"sources.{what}", name, f"is not a known {what}", f"Choose one of {known}") from None
