"""Translates the output and event files of one attempt into its journal.

Each `pump` reads every source a little further and appends the events together with the new positions. Input without
events does not move the stored positions and is read again after a restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from palaestra.errors import ConfigError
from palaestra.files.run_directory import Attempt
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
from palaestra.runs.ingest.translated_journal import Origin, TranslatedEvent, TranslatedJournal
from palaestra.runs.runner import EventFiles, Source, StdoutLines
from palaestra.runs.wire import JsonObject
from palaestra.telemetry.event import EpisodeSummary, LogLine, TrainingStep

T = TypeVar("T")

_FIND_FILES_EVERY_S = 0.5
_MAX_RECORDS = 4_000
_MAX_REASON_LENGTH = 200
_MAX_THINNED_METRICS = 2_000


@dataclass
class TranslationCounts:
    """Counters of everything but events."""

    unread_lines: int = 0
    episode_lines: int = 0
    corrupt: int = 0
    """Damaged places in event files."""
    dropped: int = 0
    """Lines marked as events that could not be parsed."""
    first_dropped: str = ""
    """Place and reason of the first dropped line or damaged place."""
    episodes: int = 0
    tracking_url: str = ""

    def add_dropped(self, place: str, reason: object) -> None:
        """Count a dropped line."""
        self.dropped += 1
        self._remember(place, reason)

    def add_corrupt(self, place: str, reason: object, count: int = 1) -> None:
        """Count damaged places in an event file."""
        if count:
            self.corrupt += count
            self._remember(place, reason)

    def _remember(self, place: str, reason: object) -> None:
        # Bounded, because it is stored with every batch and shown in an alarm.
        self.first_dropped = self.first_dropped or f"{place}: {str(reason)[:_MAX_REASON_LENGTH]}"


class Thinning:
    """Keeps the first value of each metric per `every` steps, for trainers that report every gradient step."""

    def __init__(self, every: int, stored: Mapping[str, int] | None = None) -> None:
        self._every = every
        self.last_kept = dict(stored or {})
        """The last interval with a kept value, by metric; pass it to another instance to continue."""

    def keeps(self, name: str, step: int) -> bool:
        """Whether this value is kept."""
        if self._every == 1:
            return True
        interval = step // self._every
        if self.last_kept.get(name) == interval:
            return False
        if name in self.last_kept or len(self.last_kept) < _MAX_THINNED_METRICS:
            self.last_kept[name] = interval
        return True


class _Shared:
    """State shared by the sources of an attempt."""

    def __init__(self, thin_every: int, state: JsonObject, clock: Callable[[], float]) -> None:
        self.counts = TranslationCounts(**state.get("counts", {}))
        self.thinning = Thinning(thin_every, state.get("thinned"))
        self.clock = clock

    def number_episode(self, episode: EpisodeSummary) -> EpisodeSummary:
        self.counts.episodes += 1
        return episode if episode.episode else replace(episode, episode=self.counts.episodes)

    def thin_step(self, step: TrainingStep) -> TrainingStep | None:
        """Remove the metrics that thinning drops; None when none is left."""
        metrics = {name: value for name, value in step.metrics.items() if self.thinning.keeps(name, step.env_step)}
        if len(metrics) == len(step.metrics):
            return step
        return replace(step, metrics=metrics) if metrics else None


class _StdoutSource:
    """Reads stdout.log in an output format."""

    def __init__(self, path: Path, source: StdoutLines, state: JsonObject, shared: _Shared) -> None:
        self._format = _look_up(OUTPUT_FORMATS, source.format, "format")
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
        return {"file": [self._tail.inode, self._tail.offset]}

    def bytes_read(self) -> int:
        return self._tail.offset


class _EventFileSource:
    """Reads TensorBoard files below the working directory, including those created later."""

    def __init__(self, work: Path, source: EventFiles, state: JsonObject, shared: _Shared) -> None:
        self._work, self._pattern = work, source.pattern
        self._metric_names = _look_up(TAGS, source.tags, "tag table")
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
        files = {name: [tail.inode, tail.offset] for name, tail in self._tails.items()}
        pending = self._pairing.pending if self._pairing else None
        return {"files": files, "pending": list(pending) if pending else None}

    def bytes_read(self) -> int:
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


class Translator:
    """Translates the sources of one attempt."""

    def __init__(
        self,
        attempt: Attempt,
        sources: tuple[Source, ...],
        thin_every: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._journal = TranslatedJournal(attempt.journal)
        state = self._journal.state
        try:
            self._shared = _Shared(thin_every, state, clock)
            # Stored states belong to sources by their order in the plan.
            stored = state.get("sources", [])
            self._sources: list[_StdoutSource | _EventFileSource] = []
            for source in sources:
                source_state = stored[len(self._sources)] if len(self._sources) < len(stored) else {}
                if isinstance(source, StdoutLines):
                    self._sources.append(_StdoutSource(attempt.stdout, source, source_state, self._shared))
                elif isinstance(source, EventFiles):
                    self._sources.append(_EventFileSource(attempt.work, source, source_state, self._shared))
        except BaseException:
            self._journal.close()
            raise

    @property
    def counts(self) -> TranslationCounts:
        """Counters of everything but events."""
        return self._shared.counts

    def pump(self, limit: int, *, final: bool = False) -> int:
        """Translate at most `limit` further lines or records of each source and return their number.

        `final` means that the files are no longer written: incomplete lines and episodes are translated as they are.
        """
        events: list[TranslatedEvent] = []
        count = sum(source.read(limit, events, final=final) for source in self._sources)
        if events:
            self._journal.append(events, self._state())
        return count

    def bytes_read(self) -> int:
        """Return the number of bytes read from all sources."""
        return sum(source.bytes_read() for source in self._sources)

    def close(self) -> None:
        """Close the journal. May be called again."""
        self._journal.close()

    def _state(self) -> JsonObject:
        state: JsonObject = {
            "schema": 1,
            "sources": [source.state() for source in self._sources],
            "counts": vars(self._shared.counts).copy(),
        }
        if self._shared.thinning.last_kept:
            state["thinned"] = dict(self._shared.thinning.last_kept)
        return state


def _look_up(table: dict[str, T], name: str, what: str) -> T:
    try:
        return table[name]
    except KeyError:
        known = ", ".join(table)
        raise ConfigError(f"sources.{what}", name, f"is not a known {what}", f"Choose one of {known}") from None
