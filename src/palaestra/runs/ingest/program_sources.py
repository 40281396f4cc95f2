"""The metrics of any program: the file of `palaestra.log`, TensorBoard files that it creates, and what it prints.

Lines of `palaestra.log` and event files are always read. JSON lines on stdout are read unless the program reports in
one of these ways, and other text is searched unless it reports in any of these ways: otherwise a number that a program
both logs and prints would be stored twice.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from palaestra.files.run_directory import Attempt
from palaestra.processes.procfs import read_stat, read_variable
from palaestra.runs.ingest.event_file import EventFileTail
from palaestra.runs.ingest.printed_metrics import PrintedMetrics
from palaestra.runs.ingest.sources import EventFileSource
from palaestra.runs.ingest.stdout import MAX_LINE_BYTES, Line, LineTail
from palaestra.runs.ingest.trainer_formats import EVENT_PREFIX, find_tracking_url, parse_event_line
from palaestra.runs.ingest.translated_journal import Origin, TranslatedEvent
from palaestra.runs.ingest.translation_state import TranslationState
from palaestra.runs.runner import EventFiles, NewEventFiles
from palaestra.runs.state.attempt_files import LABEL_VARIABLE, read_status
from palaestra.runs.wire import JsonObject
from palaestra.telemetry.event import EpisodeSummary, Event, TrainingStep

_EVENT_FILE = re.compile(
    r"events\.out\.tfevents\.(?P<created>\d{9,11})\.(?P<host>.+?)(?:\.(?P<pid>\d+))?(?:\.\d+)?(?:\.v2)?"
)
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "env"})
_MAX_LEVELS = 8
_MAX_DIRECTORIES = 20_000
_SEARCH_S = 0.004
"""Time of one search step. The thread that searches also ingests the metrics of all other runs."""
_FINAL_SEARCH_S = 5.0
_SEARCH_AGAIN_S = 0.5
_PARSE_S = 0.02
"""Time for which the output of one program is parsed before the other runs have their turn."""
_LINES_AT_ONCE = 100


class LogFileSource:
    """Reads the events that a program appends to log.jsonl of its attempt."""

    def __init__(self, path: Path, state: JsonObject, shared: TranslationState) -> None:
        inode, offset = state.get("file", (0, 0))
        self._tail, self._shared, self._name = LineTail(path, offset, inode), shared, path.name
        if offset:
            shared.reported_by = "log"

    def read(self, limit: int, events: list[TranslatedEvent], *, final: bool) -> int:
        """Read at most `limit` lines, append their events, and return the number of lines."""
        lines = self._tail.read(limit, final=final)
        for line in lines:
            if not line.text.strip():
                continue
            self._shared.reported_by = "log"
            try:
                event, when = parse_event_line(line.text), _read_time(line.text)
            except ValueError as error:
                _drop(self._shared, self._name, line, error)
                continue
            origin = Origin("log", self._name, line.offset)
            _append(self._shared, events, event, origin, self._shared.clock() if when is None else when)
        return len(lines)

    def state(self) -> JsonObject:
        """The position from which another instance continues."""
        return {"file": [self._tail.inode, self._tail.offset]}

    def bytes_read(self) -> int:
        """Number of bytes read."""
        return self._tail.offset


class NewEventFileSource(EventFileSource):
    """Reads the TensorBoard files that the processes of an attempt create."""

    def __init__(self, attempt: Attempt, source: NewEventFiles, state: JsonObject, shared: TranslationState) -> None:
        super().__init__(attempt.work, EventFiles("", "script"), state, shared)
        self._finder = EventFileFinder(attempt, Path(source.root))
        self._has_numbers = bool(state.get("numbers", False))
        if self._tails:
            shared.reported_by = shared.reported_by or "tensorboard"

    def state(self) -> JsonObject:
        """The position from which another instance continues."""
        return {**super().state(), "numbers": self._has_numbers}

    def read(self, limit: int, events: list[TranslatedEvent], *, final: bool) -> int:
        """Read at most `limit` records, append their events, and return the number of records."""
        for path in self._finder.find(final=final):
            name = str(path)
            if name not in self._tails:
                self._tails[name] = EventFileTail(path)
                self._shared.reported_by = self._shared.reported_by or "tensorboard"
        before = len(events)
        count = super().read(limit, events, final=final)
        self._has_numbers = self._has_numbers or len(events) > before
        self._shared.has_empty_event_files = (
            final and count == 0 and not self._has_numbers and self._shared.reported_by == "tensorboard"
        )
        for event, _, _ in events[before:]:
            if isinstance(event, TrainingStep):
                self._shared.remember_origin(event.metrics, "tensorboard")
        return count

    def _find_files(self) -> None:
        """Files are found by the finder."""


class EventFileFinder:
    """Finds event files that belong to one attempt: created since its start, and by one of its processes.

    Searches the files that its processes hold open, and below a directory. A search proceeds in short steps. Hidden
    directories, installed packages and the state directory are left out.
    """

    def __init__(self, attempt: Attempt, root: Path) -> None:
        self._attempt, self._root = attempt, root
        self._home = attempt.path.parent.parent.parent
        self._started: float | None = None
        self._label = ""
        self._trainer = 0
        self._others: set[str] = set()
        """Files of other processes."""
        self._walk: Iterator[Path | None] | None = None
        self._spent_s = 0.0
        """Time that the current search has taken."""
        self._next_search = 0.0

    def find(self, *, final: bool = False) -> list[Path]:
        """Files of the attempt that this step of the search met, known ones included."""
        if self._started is None and not self._read_start():
            return []
        now = time.monotonic()
        if self._walk is None and not final and now < self._next_search:
            return []
        if self._walk is None or final:
            self._walk, self._spent_s = self._search(), 0.0
        deadline = now + (_FINAL_SEARCH_S if final else _SEARCH_S)
        paths = []
        for path in self._walk:
            if path is not None and self._is_ours(path):
                paths.append(path)
            if time.monotonic() >= deadline:
                self._spent_s += time.monotonic() - now
                break
        else:
            # A large directory is searched less often, so that searching takes at most a twentieth of the time.
            self._spent_s += time.monotonic() - now
            self._next_search = time.monotonic() + max(_SEARCH_AGAIN_S, 20 * self._spent_s)
            self._walk = None
        return sorted(paths, key=lambda path: (path.name, str(path)))

    def _read_start(self) -> bool:
        status = read_status(self._attempt)
        if status.started is None:
            return False
        self._started, self._label = status.started, status.label
        self._trainer = 0 if status.trainer is None else status.trainer.pid
        return True

    def _search(self) -> Iterator[Path | None]:
        """All event files, and None for every place that was searched."""
        yield from self._open_files()
        pending, count = [(self._root, 0)], 0
        while pending and count < _MAX_DIRECTORIES:
            directory, level = pending.pop()
            count += 1
            yield None
            try:
                with os.scandir(directory) as entries:
                    for entry in entries:
                        if entry.name.startswith("events.out.tfevents."):
                            yield Path(entry.path)
                        elif (
                            level < _MAX_LEVELS
                            and not entry.name.startswith(".")
                            and entry.name not in _SKIPPED
                            and entry.is_dir(follow_symlinks=False)
                            and Path(entry.path) != self._home
                        ):
                            pending.append((Path(entry.path), level + 1))
            except OSError:
                continue

    def _open_files(self) -> Iterator[Path | None]:
        """Event files that the trainer and its descendants have open, wherever they are."""
        pending = [self._trainer] if self._trainer else []
        while pending:
            pid = pending.pop()
            yield None
            try:
                with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
                    pending += map(int, file.read().split())
                for name in os.listdir(f"/proc/{pid}/fd"):
                    target = os.readlink(f"/proc/{pid}/fd/{name}")
                    if "/events.out.tfevents." in target and not target.endswith(" (deleted)"):
                        yield Path(target)
            except OSError:
                continue

    def _is_ours(self, path: Path) -> bool:
        match = _EVENT_FILE.fullmatch(path.name)
        if match is None or str(path) in self._others or self._started is None:
            return False
        try:
            is_new = min(int(match["created"]) + 1, math.ceil(path.stat().st_mtime)) >= self._started
        except OSError:
            return False
        if not is_new:
            return False
        pid = int(match["pid"] or 0)
        # Another run may log into the same directory at the same time; a process that has ended cannot be asked.
        if pid and read_stat(pid) is not None and read_variable(pid, LABEL_VARIABLE) != self._label:
            self._others.add(str(path))
            return False
        return True


class ProgramOutputSource:
    """Reads what a program prints: marked events, JSON lines, and text in which metrics are searched."""

    def __init__(self, path: Path, state: JsonObject, shared: TranslationState) -> None:
        inode, offset = state.get("file", (0, 0))
        self._path, self._shared = path, shared
        self._tail = LineTail(path, offset, inode, splits_returns=True)
        self._printed = PrintedMetrics(state.get("printed"))
        self._has_json = bool(state.get("json", False))
        self._skipped: int | None = state.get("skipped")
        """Where the text begins that was not searched."""

    def read(self, limit: int, events: list[TranslatedEvent], *, final: bool) -> int:
        """Read at most `limit` lines, append their events, and return the number of lines.

        Returns the limit if it stopped earlier to let other runs have their turn.
        """
        deadline, count = time.monotonic() + _PARSE_S, 0
        while count < limit:
            lines = self._tail.read(min(_LINES_AT_ONCE, limit - count), final=final)
            for line in lines:
                self._read_line(line, events)
            count += len(lines)
            if len(lines) < _LINES_AT_ONCE:
                break
            if time.monotonic() >= deadline and not final:
                return limit
        if final and count == 0 and self._skipped is not None and self._shared.has_empty_event_files:
            # Its event files hold no numbers: search its text after all.
            self._tail = LineTail(self._path, self._skipped, self._tail.inode, splits_returns=True)
            self._shared.reported_by, self._skipped = "", None
            return 1
        if final and count == 0:
            for step in self._printed.finish():
                self._add(step, "stdout", self._tail.offset, events)
        return count

    def state(self) -> JsonObject:
        """The position from which another instance continues."""
        position = {"file": [self._tail.inode, self._tail.offset], "printed": self._printed.state()}
        return {**position, "json": self._has_json, "skipped": self._skipped}

    def bytes_read(self) -> int:
        """Number of bytes read."""
        return self._tail.offset

    def _read_line(self, line: Line, events: list[TranslatedEvent]) -> None:
        text = line.text
        if not text.strip():
            return
        counts = self._shared.counts
        counts.tracking_url = find_tracking_url(text) or counts.tracking_url
        if EVENT_PREFIX in text:
            _, _, body = text.rpartition(EVENT_PREFIX)
            if body.lstrip().startswith("{"):
                self._shared.reported_by = self._shared.reported_by or "events"
                try:
                    event = parse_event_line(body)
                except ValueError as error:
                    _drop(self._shared, self._path.name, line, error)
                    return
                self._add(event, "events", line.offset, events)
                return
        if self._shared.reported_by:
            counts.unread_lines += 1
            self._skipped = line.offset if self._skipped is None else self._skipped
            return
        step = self._printed.parse_json(text)
        if step is not None:
            self._has_json = True
            self._add(step, "json", line.offset, events)
        elif not self._has_json:
            for step in self._printed.parse(text):
                self._add(step, "stdout", line.offset, events)

    def _add(self, event: Event, source: str, offset: int, events: list[TranslatedEvent]) -> None:
        origin = Origin("stdout:program" if source == "stdout" else f"stdout:{source}", self._path.name, offset)
        _append(self._shared, events, event, origin, self._shared.clock())


def _append(shared: TranslationState, events: list[TranslatedEvent], event: Event, origin: Origin, when: float) -> None:
    if isinstance(event, TrainingStep):
        thinned = shared.thin_step(event)
        if thinned is None:
            return
        shared.remember_origin(thinned.metrics, origin.source.partition(":")[0])
        event = thinned
    elif isinstance(event, EpisodeSummary):
        event = shared.number_episode(event)
    events.append(TranslatedEvent(event, origin, when))


def _drop(shared: TranslationState, file: str, line: Line, error: ValueError) -> None:
    reason = f"the line is longer than {MAX_LINE_BYTES:,} bytes" if line.cut else error
    shared.counts.add_dropped(f"byte {line.offset} of {file}", reason)


def _read_time(text: str) -> float | None:
    """The time that a line of the log says; None without one."""
    when = json.loads(text).get("time")
    is_time = isinstance(when, int | float) and not isinstance(when, bool) and math.isfinite(when) and when > 0
    return float(when) if is_time else None
