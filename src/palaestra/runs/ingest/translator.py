"""Output and event files of one attempt become its journal.

Each `pump` reads every source a little further, makes events of what it finds and archives them together with the
positions it came to. What yields no event moves no stored position either and is merely read again after a restart.
Reads files and writes the archive; knows nothing of processes or of who reads the journal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from palaestra.errors import ConfigError
from palaestra.files.run_directory import Attempt
from palaestra.runs.ingest.archive import Archive, Entry, Origin
from palaestra.runs.ingest.event_file import EventFileTail, Framed
from palaestra.runs.ingest.event_record import read_event
from palaestra.runs.ingest.grammar import GRAMMARS, tracking_url
from palaestra.runs.ingest.stdout_tail import LONGEST_LINE, LineTail
from palaestra.runs.ingest.tags import EPISODES, TAGS, Pending, TagPairing, canonical
from palaestra.runs.ingest.thinning import Thinning
from palaestra.runs.runner import EventFiles, Source, StdoutLines
from palaestra.telemetry.event import EpisodeSummary, LogLine, TrainingStep

__all__ = ["Counts", "Translator"]

T = TypeVar("T")

_LOOK_FOR_FILES_EVERY_S = 0.5
_MOST_FRAMES = 4_000
_LONGEST_REASON = 200
_DAMAGED = "a damaged record before this was skipped"


@dataclass
class Counts:
    """What was met besides events."""

    unread_lines: int = 0
    episode_lines: int = 0
    corrupt: int = 0
    dropped: int = 0
    """Lines marked as events that could not be read as such."""
    first_dropped: str = ""
    """Where the first of them, or of the damaged places, is and what was wrong with it."""
    episodes: int = 0
    tracking_url: str = ""

    def drop(self, where: str, reason: object) -> None:
        """Count a line that was lost."""
        self.dropped += 1
        self._remember(where, reason)

    def damage(self, where: str, reason: object, count: int = 1) -> None:
        """Count damaged places in an event file."""
        if count:
            self.corrupt += count
            self._remember(where, reason)

    def _remember(self, where: str, reason: object) -> None:
        # Bounded: it is stored with every batch and shown in an alarm.
        self.first_dropped = self.first_dropped or f"{where}: {str(reason)[:_LONGEST_REASON]}"


class _Lines:
    """stdout.log by a grammar."""

    def __init__(self, path: Path, source: StdoutLines, state: dict[str, Any], common: _Common) -> None:
        self._grammar = _named(GRAMMARS, source.grammar, "grammar")
        self._origin = Origin(f"stdout:{source.grammar}", path.name, 0)
        inode, offset = state.get("file", (0, 0))
        self._tail = LineTail(path, offset, inode)
        self._common = common

    def read(self, limit: int, entries: list[Entry], *, final: bool) -> int:
        lines = self._tail.read(limit, final=final)
        counts, now = self._common.counts, self._common.clock()
        for text, offset, cut in lines:
            if not text.strip():
                continue
            if self._grammar.is_episode(text):
                counts.episode_lines += 1
            counts.tracking_url = tracking_url(text) or counts.tracking_url
            try:
                events = self._grammar.parse(text)
            except ValueError as error:
                reason = f"the line is longer than {LONGEST_LINE:,} bytes" if cut else error
                counts.drop(f"byte {offset} of {self._origin.file}", reason)
                continue
            if events is None:
                counts.unread_lines += 1
                continue
            for event in events:
                if isinstance(event, TrainingStep):
                    kept = self._common.kept(event)
                    if kept is None:
                        continue
                    event = kept
                elif isinstance(event, EpisodeSummary):
                    event = self._common.numbered(event)
                entries.append(Entry(event, self._origin._replace(offset=offset), now))
        return len(lines)

    def state(self) -> dict[str, Any]:
        return {"file": [self._tail.inode, self._tail.offset]}

    def read_bytes(self) -> int:
        return self._tail.offset


class _EventFiles:
    """TensorBoard files below the working directory, those included that appear later."""

    def __init__(self, work: Path, source: EventFiles, state: dict[str, Any], common: _Common) -> None:
        self._work, self._pattern = work, source.pattern
        self._table = _named(TAGS, source.tags, "tag table")
        self._source = f"tensorboard:{source.tags}"
        self._common = common
        pending = state.get("pending")
        tags = EPISODES.get(source.tags)
        self._pairing = TagPairing(tags, Pending(*pending) if pending else None) if tags else None
        self._tails: dict[str, EventFileTail] = {
            name: EventFileTail(work / name, offset, inode) for name, (inode, offset) in state.get("files", {}).items()
        }
        self._looked = float("-inf")

    def read(self, limit: int, entries: list[Entry], *, final: bool) -> int:
        self._look(always=final)
        room = min(limit, _MOST_FRAMES)
        count = 0
        for name, tail in self._tails.items():
            before = tail.corruptions
            framed = tail.read(room - count)
            self._common.counts.damage(f"byte {tail.offset} of {name}", _DAMAGED, tail.corruptions - before)
            entries.extend(self._translated(name, framed))
            count += len(framed)
            if count >= room:
                break
        if final and count == 0:
            self._end(entries)
        return count

    def state(self) -> dict[str, Any]:
        files = {name: [tail.inode, tail.offset] for name, tail in self._tails.items()}
        pending = self._pairing.pending if self._pairing else None
        return {"files": files, "pending": list(pending) if pending else None}

    def read_bytes(self) -> int:
        return sum(tail.offset for tail in self._tails.values())

    def _look(self, *, always: bool) -> None:
        now = time.monotonic()
        if not always and now - self._looked < _LOOK_FOR_FILES_EVERY_S:
            return
        self._looked = now
        found = {str(path.relative_to(self._work)) for path in self._work.glob(self._pattern) if path.is_file()}
        # Their names begin with the second they were made in; a trainer that starts again makes another.
        for name in sorted(found - self._tails.keys(), key=lambda name: (Path(name).name, name)):
            self._tails[name] = EventFileTail(self._work / name)

    def _translated(self, file: str, framed: list[Framed]) -> Iterator[Entry]:
        """Neighbouring scalars of one step become one `TrainingStep`."""
        group: dict[str, float] = {}
        pairing = self._pairing
        origin, step, when = Origin(self._source, file, 0), 0, 0.0
        for offset, payload in framed:
            try:
                record = read_event(payload)
            except ValueError as error:
                self._common.counts.damage(f"byte {offset} of {file}", error)
                continue
            if record.session_start and record.step:
                text = f"the trainer began again: curves of {file} before this are void from step {record.step} on"
                yield Entry(LogLine("warning", text), Origin(self._source, file, offset), record.wall_time)
            if group and record.step != step:
                yield Entry(TrainingStep(0, step, group), origin, when)
                group = {}
            for tag, value in record.values:
                episodes = pairing.take(tag, record.step, value, record.wall_time) if pairing else None
                if episodes is not None:
                    here = Origin(self._source, file, offset)
                    yield from (Entry(self._common.numbered(one), here, ended) for one, ended in episodes)
                    continue
                name = canonical(self._table, tag)
                if not self._common.thinning.keeps(name, record.step):
                    continue
                if name in group:
                    yield Entry(TrainingStep(0, step, group), origin, when)
                    group = {}
                if not group:
                    origin, step = Origin(self._source, file, offset), record.step
                group[name] = value
                when = record.wall_time
        if group:
            yield Entry(TrainingStep(0, step, group), origin, when)

    def _end(self, entries: list[Entry]) -> None:
        """Nobody writes any more: what is unfinished stays so."""
        for name, tail in self._tails.items():
            before, where = tail.corruptions, f"byte {tail.offset} of {name}"
            tail.give_up()
            self._common.counts.damage(where, "the last record is not complete", tail.corruptions - before)
        if self._pairing is not None and self._tails:
            name, tail = list(self._tails.items())[-1]
            origin = Origin(self._source, name, tail.offset)
            entries.extend(Entry(self._common.numbered(one), origin, when) for one, when in self._pairing.left())


class _Common:
    """What all sources of an attempt share."""

    def __init__(self, thin_every: int, state: dict[str, Any], clock: Callable[[], float]) -> None:
        self.counts = Counts(**state.get("counts", {}))
        self.thinning = Thinning(thin_every, state.get("thinned"))
        self.clock = clock

    def numbered(self, episode: EpisodeSummary) -> EpisodeSummary:
        self.counts.episodes += 1
        return episode if episode.episode else replace(episode, episode=self.counts.episodes)

    def kept(self, step: TrainingStep) -> TrainingStep | None:
        """The part of it that is not thinned out."""
        metrics = {name: value for name, value in step.metrics.items() if self.thinning.keeps(name, step.env_step)}
        if len(metrics) == len(step.metrics):
            return step
        return replace(step, metrics=metrics) if metrics else None


class Translator:
    """Reads the sources of one attempt on."""

    def __init__(
        self,
        attempt: Attempt,
        sources: tuple[Source, ...],
        thin_every: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._archive = Archive(attempt.journal)
        state = self._archive.state
        try:
            self._common = _Common(thin_every, state, clock)
            # Two runs of the service know the sources by their order, which is the plan's.
            before = state.get("sources", [])
            self._sources: list[_Lines | _EventFiles] = []
            for source in sources:
                stored = before[len(self._sources)] if len(self._sources) < len(before) else {}
                if isinstance(source, StdoutLines):
                    self._sources.append(_Lines(attempt.stdout, source, stored, self._common))
                elif isinstance(source, EventFiles):
                    self._sources.append(_EventFiles(attempt.work, source, stored, self._common))
        except BaseException:
            self._archive.close()
            raise

    @property
    def counts(self) -> Counts:
        """What was met besides events."""
        return self._common.counts

    def pump(self, limit: int, *, final: bool = False) -> int:
        """Translate at most `limit` further items of each source; how many there were.

        `final` says that nobody writes any more: unfinished lines and episodes are taken as they are.
        """
        entries: list[Entry] = []
        count = sum(source.read(limit, entries, final=final) for source in self._sources)
        if entries:
            self._archive.append(entries, self._state())
        return count

    def read_bytes(self) -> int:
        """How far the sources were read, all together."""
        return sum(source.read_bytes() for source in self._sources)

    def close(self) -> None:
        """Release the archive. Harmless when repeated."""
        self._archive.close()

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "schema": 1,
            "sources": [source.state() for source in self._sources],
            "counts": vars(self._common.counts).copy(),
        }
        if self._common.thinning.stretches:
            state["thinned"] = dict(self._common.thinning.stretches)
        return state


def _named(table: dict[str, T], name: str, what: str) -> T:
    try:
        return table[name]
    except KeyError:
        known = ", ".join(table)
        raise ConfigError(f"sources.{what}", name, f"is no {what} of ours", f"Choose one of {known}") from None
