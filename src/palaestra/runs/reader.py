"""Reads runs from the registry and the run directories, for the command line and the HTTP routes; needs no service.

Writes only series that lag behind their journal. Heavy modules are imported when metrics are read: listing ten thousand
runs must take less than half a second.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from palaestra.errors import ConfigError, UnknownRun
from palaestra.files.atomic import read_json
from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt, RunDirectory, check_run_id
from palaestra.redaction import Redactor, redact_secrets
from palaestra.runs.phase import Phase, determine_outcome
from palaestra.runs.record import LASTING_ALARMS, BeliefHistory, BeliefRecord, RunEvent, RunRecord
from palaestra.runs.state.attempt_files import read_exit_facts, read_status
from palaestra.runs.state.event_log import RunEventLog
from palaestra.runs.state.unsupervised import may_have_changed, read_unsupervised
from palaestra.runs.store.registry import open_registry_read_only
from palaestra.runs.supervisor.queue import QueueFile, waiting_reason
from palaestra.runs.wire import JsonObject, upgrade_names

if TYPE_CHECKING:
    from palaestra.runs.series import MetricInfo, MetricPoint
    from palaestra.runs.series.reader import RunSeries

_MAX_LINE_BYTES = 1 << 20
_SERIES_LOCK_TIMEOUT_S = 5.0
_BELIEF_TAIL_BYTES = 1 << 22


class LogChunk(NamedTuple):
    """Whole lines of an output."""

    text: str
    offset: int
    """Offset of the next chunk."""
    size: int
    """Current size of the output."""


class RunReader:
    """Reads the runs of one state directory."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._queue = QueueFile(home)
        self._redact = Redactor.from_environment(os.environ)

    def runs(
        self,
        *,
        phases: Collection[Phase] | None = None,
        runner: str | None = None,
        env_id: str | None = None,
        tag: str | None = None,
        agent_id: str | None = None,
        search: Collection[str] = (),
        archived: bool = False,
        before: str | None = None,
        limit: int | None = None,
    ) -> list[RunRecord]:
        """Runs that match all filters in their current state, newest first; with `before`, those older than that run.

        Every word of `search` must occur in the id, name, agent, environment, host, a tag, the notes or the reason.
        """
        before_key = None if before is None else _sort_key(self.run(before))
        filters_later = phases is not None or agent_id is not None or bool(search)
        registry = open_registry_read_only(self.home)
        if registry is None:
            known, rows = frozenset[str](), list[RunRecord]()
        else:
            with closing(registry):
                rows = registry.runs(
                    phases=_possible_phases(phases),
                    runner=runner,
                    env_id=env_id,
                    tag=tag,
                    archived=archived,
                    before=before_key,
                    limit=None if filters_later else limit,
                )
                known = registry.ids()
        if not archived:
            unregistered = self._unregistered_runs(known)
            rows += [
                row
                for row in unregistered
                if runner in (None, row.runner) and env_id in (None, row.env_id) and (tag is None or tag in row.tags)
            ]
            if unregistered:
                rows.sort(key=_sort_key, reverse=True)
            if before_key is not None:
                rows = [row for row in rows if _sort_key(row) < before_key]
        records = [self._current(row) for row in rows]
        if phases is not None:
            records = [record for record in records if record.phase in phases]
        if agent_id is not None:
            records = [record for record in records if record.agent_id == agent_id]
        words = [word.lower() for word in search]
        return [record for record in records if _matches(record, words)][:limit]

    def run(self, name: str) -> RunRecord:
        """The run with this id or unique prefix of an id; `UnknownRun` otherwise."""
        matches = self._matching(check_run_id(name))
        if len(matches) == 1:
            return self._current(matches[0])
        if matches:
            run_ids = sorted(row.run_id for row in matches)[:5]
            raise UnknownRun("run", name, "is a prefix of several runs", f"Which of {', '.join(run_ids)}?")
        raise UnknownRun("run", name, "no such run", "palaestra runs list --all shows them")

    def paths(self, run_id: str) -> RunDirectory:
        """The directory of a run; `ConfigError` when it is archived or was removed."""
        record = self.run(run_id)
        if record.archived:
            remedy = f"palaestra runs restore {record.run_id}"
            raise ConfigError("run", record.run_id, "is archived and cannot be read", remedy)
        paths = self.home.run(record.run_id)
        if not paths.path.is_dir():
            raise ConfigError("run", record.run_id, f"its directory {paths.path} is gone", "Restore it to read it")
        return paths

    def events(self, run_id: str) -> list[RunEvent]:
        """The events of a run."""
        return RunEventLog(self.paths(run_id)).read()

    def document(self, run_id: str, name: str, attempt: int | None = None) -> JsonObject:
        """The stored `spec`, or the `resolved` or `command` of an attempt (default: the newest); empty without one."""
        paths = None if name == "spec" else self.attempt(run_id, attempt)
        document = None if paths is None else read_json(paths.path / f"{name}.json")
        if document is None and (paths is None or name == "resolved"):
            # A runner that does not write resolved.json itself has one for all attempts.
            document = read_json(self.paths(run_id).path / f"{name}.json")
        if name == "spec":
            return upgrade_names(document or {})
        return dict(redact_secrets(document or {}))

    def log(self, run_id: str, offset: int = 0, limit: int = 1 << 20, attempt: int | None = None) -> LogChunk:
        """Whole lines of an attempt's output from a byte offset, redacted; a negative offset counts from the end."""
        paths = self.attempt(run_id, attempt)
        if paths is None:
            return LogChunk("", 0, 0)
        return read_lines(paths, offset, limit, self._redact)

    def last_lines(self, run_id: str, count: int, attempt: int | None = None) -> LogChunk:
        """The last lines of an attempt's output, redacted."""
        paths = self.attempt(run_id, attempt)
        if paths is None or not paths.stdout.exists():
            return LogChunk("", 0, 0)
        size = paths.stdout.stat().st_size
        tail_bytes = 1 << 16
        while True:
            chunk = read_lines(paths, max(0, size - tail_bytes), tail_bytes, self._redact, cut=size > tail_bytes)
            lines = chunk.text.splitlines(keepends=True)
            if len(lines) >= count or tail_bytes >= size or tail_bytes >= 1 << 26:
                return chunk._replace(text="".join(lines[len(lines) - min(count, len(lines)) :]))
            tail_bytes *= 4

    def beliefs(self, run_id: str, after: str = "", limit: int = 100) -> BeliefHistory:
        """The last records of beliefs in the newest attempt, or those that follow `after`, at most `limit`.

        Searches at most the last 4 MiB of the journal; a resumed attempt is read from its beginning.
        """
        attempt = self.attempt(run_id)
        if attempt is None:
            return BeliefHistory((), "")
        number, _, offset = after.partition(":")
        start = int(offset) if number == str(attempt.number) else None
        return _read_beliefs(attempt, start, limit)

    def metric_names(self, run_id: str) -> dict[str, MetricInfo]:
        """All metrics of a run by name, with their number of points and source."""
        return self._series(run_id).names()

    def recent_metrics(
        self, run_id: str, count: int, names: Collection[str] = (), *, last: int | None = None
    ) -> dict[str, list[MetricPoint]]:
        """The last points of the named metrics (default: of all metrics), up to the step `last`, if given."""
        series = self._series(run_id)
        before = None if last is None else last + 1
        return {name: series.recent(name, count, before) for name in self._check_names(series.names(), names)}

    def metrics(
        self,
        run_id: str,
        names: Collection[str],
        *,
        points: int = 2000,
        first: int | None = None,
        last: int | None = None,
    ) -> dict[str, list[MetricPoint]]:
        """At most `points` points of each metric between two steps, including the extremes."""
        series = self._series(run_id)
        return {name: series.decimate(name, points, first, last) for name in self._check_names(series.names(), names)}

    def _series(self, run_id: str) -> RunSeries:
        from palaestra.runs.ingest.feed import update_series
        from palaestra.runs.series.reader import RunSeries

        paths = self.paths(run_id)
        # The service holds the lock of the series for as long as a run is live.
        wait_s = _SERIES_LOCK_TIMEOUT_S if self.run(run_id).phase.has_ended else 0.0
        for attempt in paths.attempts():
            update_series(attempt, wait_s=wait_s)
        return RunSeries(paths)

    def _check_names(self, known: Collection[str], names: Collection[str]) -> list[str]:
        for name in names:
            if name not in known:
                import difflib

                close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
                remedy = f"Nearest: {', '.join(close)}" if close else f"There are {', '.join(sorted(known)[:10])}"
                raise ConfigError("metric", name, "the run has no such metric", remedy if known else "")
        return list(names) or list(known)

    def attempt(self, run_id: str, number: int | None = None) -> Attempt | None:
        """The directory of an attempt (default: the newest); None before the first."""
        attempts = self.paths(run_id).attempts()
        if number is None:
            return attempts[-1] if attempts else None
        match = next((attempt for attempt in attempts if attempt.number == number), None)
        if match is None:
            numbers = ", ".join(str(attempt.number) for attempt in attempts)
            remedy = f"There are {numbers}" if numbers else ""
            raise ConfigError("attempt", number, "the run has no such attempt", remedy)
        return match

    def _matching(self, name: str) -> list[RunRecord]:
        """The run with this id; else runs with this prefix, registered or not. Incomplete when there are several."""
        rows: list[RunRecord] = []
        registry = open_registry_read_only(self.home)
        if registry is not None:
            with closing(registry):
                row = registry.get(name)
                if row is not None:
                    return [row]
                candidates = (registry.get(run_id) for run_id in registry.ids_with_prefix(name))
                rows = [row for row in candidates if row is not None]
        exact = list(self._read([name]))
        if exact or len(rows) > 1:
            return exact or rows
        return [*rows, *self._unregistered_runs({row.run_id for row in rows}, name)]

    def _unregistered_runs(self, known: Collection[str], prefix: str = "") -> list[RunRecord]:
        """Runs with this prefix whose directories are not in the registry yet."""
        try:
            names = [name for name in os.listdir(self.home.runs) if name not in known and name[0] != "."]
        except FileNotFoundError:
            return []
        return list(self._read([name for name in names if name.startswith(prefix)]))

    def _read(self, names: list[str]) -> Iterator[RunRecord]:
        for name in names:
            paths = self.home.run(name)
            row = read_unsupervised(paths)
            if row is None and paths.spec.exists():
                from palaestra.runs.store.rebuild import read_run

                row = read_run(paths)
            if row is not None:
                yield row

    def _current(self, row: RunRecord) -> RunRecord:
        """The current state of a row: a run may have ended since the row was written."""
        if row.phase is Phase.QUEUED:
            return dataclasses.replace(row, reason=waiting_reason(row, self._queue.reason(row.run_id)))
        if may_have_changed(row, self.home.run(row.run_id)):
            return read_unsupervised(self.home.run(row.run_id)) or row
        if row.phase.has_ended:
            return row
        attempt = self.home.run(row.run_id).attempt(row.attempt)
        status = read_status(attempt)
        if status.alive or (status.watchdog is None and status.exit is None):
            # Running, or started so recently that its process is not recorded yet.
            return row
        outcome = determine_outcome(read_exit_facts(attempt, self._redact))
        ended = (status.exit and status.exit.ended) or row.ended
        alarms = tuple(alarm for alarm in row.alarms if alarm.code in LASTING_ALARMS)
        return dataclasses.replace(
            row, phase=outcome.phase, reason=outcome.reason, code=outcome.code, ended=ended, alarms=alarms
        )


def read_lines(attempt: Attempt, offset: int, limit: int, redact: Redactor, *, cut: bool = False) -> LogChunk:
    """Whole lines from a byte offset; with `cut`, the offset may lie within a line, whose rest is skipped."""
    try:
        with open(attempt.stdout, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = min(max(0, offset if offset >= 0 else size + offset), size)
            cut = cut or offset < 0
            file.seek(start)
            block = file.read(limit)
            # An incomplete line is left for later, unless it will never be completed.
            end = block.rfind(b"\n") + 1
            if not end and len(block) == limit:
                block += file.readline(_MAX_LINE_BYTES)
                end = len(block)
            elif end < len(block) and start + len(block) == size and attempt.exit.exists():
                end = len(block)
    except FileNotFoundError:
        return LogChunk("", 0, 0)
    lines = block[:end]
    if cut and start > 0:
        lines = lines[lines.find(b"\n") + 1 :]
    return LogChunk(redact(lines.decode("utf-8", "replace")), start + end, size)


def _read_beliefs(attempt: Attempt, start: int | None, limit: int) -> BeliefHistory:
    from palaestra.telemetry.event import Belief, decode

    try:
        with open(attempt.journal, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = max(0, size - _BELIEF_TAIL_BYTES)
            # A journal that is shorter than the offset was replaced.
            begin = first if start is None or start > size else max(start, first)
            file.seek(begin)
            block = file.read(_BELIEF_TAIL_BYTES)
    except FileNotFoundError:
        return BeliefHistory((), f"{attempt.number}:0")
    if begin and begin != start:
        cut = block.find(b"\n") + 1
        begin, block = begin + cut, block[cut:]
    block = block[: block.rfind(b"\n") + 1]
    records: list[BeliefRecord] = []
    agents_with_values: set[str] = set()
    for line in reversed(block.splitlines()):
        if len(records) == limit:
            break
        if b'"Belief"' not in line:
            continue
        try:
            seq, time, event = decode(line)
        except ValueError:
            continue  # damaged, which the alarms of the run report
        if isinstance(event, Belief):
            beliefs = dict(event.beliefs)
            if event.agent in agents_with_values:
                beliefs.pop("q_values", None)
            elif "q_values" in beliefs:
                agents_with_values.add(event.agent)
            records.append(BeliefRecord(seq, time, event.agent, beliefs))
    return BeliefHistory(tuple(reversed(records)), f"{attempt.number}:{begin + len(block)}")


def _sort_key(row: RunRecord) -> tuple[float, str]:
    return row.created, row.run_id


def _possible_phases(phases: Collection[Phase] | None) -> Collection[Phase] | None:
    """Phases in the registry of runs that are now in `phases`: a run may have ended since its row was written."""
    if phases is None:
        return None
    return {*phases, *(phase for phase in Phase if phase.has_process)}


def _matches(row: RunRecord, words: Collection[str]) -> bool:
    if not words:
        return True
    text = "\n".join(
        (row.run_id, row.name, row.agent_id, row.env_id, row.host, *row.tags, row.notes, row.reason)
    ).lower()
    return all(word in text for word in words)
