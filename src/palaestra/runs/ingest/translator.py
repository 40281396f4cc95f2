"""Translates the output and event files of one attempt into its journal.

Each `pump` reads every source a little further and appends the events together with the new positions. Input without
events does not move the stored positions and is read again after a restart.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from palaestra.files.run_directory import Attempt
from palaestra.runs.ingest.program_sources import LogFileSource, NewEventFileSource, ProgramOutputSource
from palaestra.runs.ingest.sources import EventFileSource, StdoutSource, TelemetrySource
from palaestra.runs.ingest.translated_journal import TranslatedEvent, TranslatedJournal
from palaestra.runs.ingest.translation_state import TranslationCounts, TranslationState
from palaestra.runs.runner import EventFiles, JournalFile, LogFile, NewEventFiles, ProgramOutput, Source, StdoutLines
from palaestra.runs.wire import JsonObject


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
            self._shared = TranslationState(thin_every, state, clock)
            # Stored states belong to sources by their order in the plan.
            stored = state.get("sources", [])
            translated = [source for source in sources if not isinstance(source, JournalFile)]
            self._sources: list[TelemetrySource] = [
                _open_source(attempt, source, stored[index] if index < len(stored) else {}, self._shared)
                for index, source in enumerate(translated)
            ]
        except BaseException:
            self._journal.close()
            raise

    @property
    def counts(self) -> TranslationCounts:
        """Counters of everything but events."""
        return self._shared.counts

    def find_origin(self, name: str) -> str:
        """The kind of source in which a metric of a program was found; empty for other trainers."""
        return self._shared.origins.get(name, "")

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


def _open_source(
    attempt: Attempt,
    source: StdoutLines | EventFiles | LogFile | NewEventFiles | ProgramOutput,
    state: JsonObject,
    shared: TranslationState,
) -> TelemetrySource:
    match source:
        case StdoutLines():
            return StdoutSource(attempt.stdout, source, state, shared)
        case EventFiles():
            return EventFileSource(attempt.work, source, state, shared)
        case LogFile():
            return LogFileSource(attempt.log, state, shared)
        case NewEventFiles():
            return NewEventFileSource(attempt, source, state, shared)
        case ProgramOutput():
            return ProgramOutputSource(attempt.stdout, state, shared)
