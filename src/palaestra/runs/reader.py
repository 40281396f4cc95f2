"""Everything there is to know about runs, read from the registry and the run directories; needs no service.

The command line and the HTTP routes ask the same questions here. Nothing is written but series that are behind their
journal, and nothing heavy is imported until numbers are asked for: `palaestra runs list` has half a second for ten
thousand runs.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

from palaestra.errors import ConfigError, UnknownRun
from palaestra.files.atomic import read_json
from palaestra.files.home import Home
from palaestra.files.run_directory import Attempt, RunDirectory, check_run_id
from palaestra.redaction import Redactor
from palaestra.runs.phase import Phase, determine_outcome
from palaestra.runs.record import LASTING_ALARMS, RunEvent, RunRecord
from palaestra.runs.state.attempt_status import read_exit_facts, read_status
from palaestra.runs.state.event_log import RunEventLog
from palaestra.runs.state.unsupervised import read_unsupervised
from palaestra.runs.store.registry import open_registry_read_only
from palaestra.runs.supervisor.queue import QueueFile, waiting_reason

if TYPE_CHECKING:
    from palaestra.runs.series import MetricPoint
    from palaestra.runs.series.reader import MetricInfo, RunSeries

__all__ = ["LogPiece", "RunReader"]

_LONGEST_LINE = 1 << 20
_OTHERS_S = 5.0


class LogPiece(NamedTuple):
    """Whole lines of an output."""

    text: str
    offset: int
    """Where the next piece begins."""
    size: int
    """How long the output is by now."""


class RunReader:
    """Reads one state directory."""

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
        """Runs that fit, newest first, each as it is at this moment; of pages, those older than the run `before`.

        A search finds runs of which every word is part of the id, the agent, the environment, a tag or the reason.
        """
        mark = None if before is None else _age(self.run(before))
        later = phases is not None or agent_id is not None or bool(search)
        registry = open_registry_read_only(self.home)
        if registry is None:
            known, rows = frozenset[str](), list[RunRecord]()
        else:
            with closing(registry):
                rows = registry.runs(
                    phases=_before(phases), runner=runner, env_id=env_id, tag=tag, archived=archived, before=mark,
                    limit=None if later else limit,
                )  # fmt: skip
                known = registry.ids()
        if not archived:
            strangers = self._unregistered(known)
            rows += [
                row for row in strangers
                if runner in (None, row.runner) and env_id in (None, row.env_id) and (tag is None or tag in row.tags)
            ]  # fmt: skip
            if strangers:
                rows.sort(key=_age, reverse=True)
            if mark is not None:
                rows = [row for row in rows if _age(row) < mark]
        found = [self._as_it_is(row) for row in rows]
        if phases is not None:
            found = [row for row in found if row.phase in phases]
        if agent_id is not None:
            found = [row for row in found if row.agent_id == agent_id]
        wanted = [word.lower() for word in search]
        return [row for row in found if _tells(row, wanted)][:limit]

    def run(self, name: str) -> RunRecord:
        """The run of an id, or the only one whose id begins so. `UnknownRun` otherwise."""
        matches = self._matching(check_run_id(name))
        if len(matches) == 1:
            return self._as_it_is(matches[0])
        if matches:
            raise _several(name, sorted(row.run_id for row in matches)[:5])
        raise UnknownRun("run", name, "no such run", "palaestra runs list --all shows them")

    def paths(self, run_id: str) -> RunDirectory:
        """Where a run lies; `ConfigError` when it is archived, or somebody removed it."""
        record = self.run(run_id)
        if record.archived:
            remedy = f"palaestra runs restore {record.run_id}"
            raise ConfigError("run", record.run_id, "is archived and cannot be read", remedy)
        paths = self.home.run(record.run_id)
        if not paths.path.is_dir():
            raise ConfigError("run", record.run_id, f"its directory {paths.path} is gone", "Put it back to read it")
        return paths

    def life(self, run_id: str) -> list[RunEvent]:
        """What happened to a run."""
        return RunEventLog(self.paths(run_id)).read()

    def document(self, run_id: str, name: str, attempt: int | None = None) -> dict[str, Any]:
        """`spec`, `resolved` or an attempt's `command` (the newest's) as stored; empty when there is none."""
        paths = self.attempt(run_id, attempt) if name == "command" else None
        return read_json((paths or self.paths(run_id)).path / f"{name}.json") or {}

    def log(self, run_id: str, offset: int = 0, limit: int = 1 << 20, attempt: int | None = None) -> LogPiece:
        """Whole lines of an attempt's output from a byte on, secrets hidden; negative counts from the end."""
        paths = self.attempt(run_id, attempt)
        if paths is None:
            return LogPiece("", 0, 0)
        return read_lines(paths, offset, limit, self._redact)

    def last_lines(self, run_id: str, count: int, attempt: int | None = None) -> LogPiece:
        """The last lines of an attempt's output, secrets hidden."""
        paths = self.attempt(run_id, attempt)
        if paths is None or not paths.stdout.exists():
            return LogPiece("", 0, 0)
        size = paths.stdout.stat().st_size
        reach = 1 << 16
        while True:
            piece = read_lines(paths, max(0, size - reach), reach, self._redact, cut=size > reach)
            lines = piece.text.splitlines(keepends=True)
            if len(lines) >= count or reach >= size or reach >= 1 << 26:
                return piece._replace(text="".join(lines[len(lines) - min(count, len(lines)) :]))
            reach *= 4

    def metric_names(self, run_id: str) -> dict[str, MetricInfo]:
        """Every metric of a run, with its number of points and where they come from."""
        return self._series(run_id).names()

    def recent_metrics(self, run_id: str, count: int, names: Collection[str] = ()) -> dict[str, list[MetricPoint]]:
        """The last points of the named metrics; of all, when none is named."""
        series = self._series(run_id)
        return {name: series.recent(name, count) for name in self._named(series.names(), names)}

    def metrics(
        self,
        run_id: str,
        names: Collection[str],
        *,
        points: int = 2000,
        first: int | None = None,
        last: int | None = None,
    ) -> dict[str, list[MetricPoint]]:
        """At most so many points of each metric between two steps, extremes among them."""
        series = self._series(run_id)
        return {name: series.decimate(name, points, first, last) for name in self._named(series.names(), names)}

    def _series(self, run_id: str) -> RunSeries:
        from palaestra.runs.ingest.feed import update_series
        from palaestra.runs.series.reader import RunSeries

        paths = self.paths(run_id)
        # Of a run that goes on, somebody else may be writing for as long as it does.
        wait_s = _OTHERS_S if self.run(run_id).phase.has_ended else 0.0
        for attempt in paths.attempts():
            update_series(attempt, wait_s=wait_s)
        return RunSeries(paths)

    def _named(self, known: Collection[str], names: Collection[str]) -> list[str]:
        for name in names:
            if name not in known:
                import difflib

                close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
                remedy = f"Nearest: {', '.join(close)}" if close else f"There are {', '.join(sorted(known)[:10])}"
                raise ConfigError("metric", name, "the run has no such metric", remedy if known else "")
        return list(names) or list(known)

    def attempt(self, run_id: str, number: int | None = None) -> Attempt | None:
        """Where an attempt lies, the newest when none is named; None before the first."""
        attempts = self.paths(run_id).attempts()
        if number is None:
            return attempts[-1] if attempts else None
        found = next((attempt for attempt in attempts if attempt.number == number), None)
        if found is None:
            there = ", ".join(str(attempt.number) for attempt in attempts)
            raise ConfigError("attempt", number, "the run has no such attempt", f"There are {there}" if there else "")
        return found

    def _matching(self, name: str) -> list[RunRecord]:
        """The run of this id; else all whose ids begin so, registered or not, as far as two are enough to know."""
        rows: list[RunRecord] = []
        registry = open_registry_read_only(self.home)
        if registry is not None:
            with closing(registry):
                row = registry.get(name)
                if row is not None:
                    return [row]
                found = (registry.get(run_id) for run_id in registry.ids_with_prefix(name))
                rows = [row for row in found if row is not None]
        exact = list(self._read([name]))
        if exact or len(rows) > 1:
            return exact or rows
        return [*rows, *self._unregistered({row.run_id for row in rows}, name)]

    def _unregistered(self, known: Collection[str], prefix: str = "") -> list[RunRecord]:
        """Runs whose ids begin so, that lie there and that no service has looked at yet."""
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

    def _as_it_is(self, row: RunRecord) -> RunRecord:
        """A row that says something lives, held against what lives."""
        if row.phase is Phase.QUEUED:
            return dataclasses.replace(row, reason=waiting_reason(row, self._queue.reason(row.run_id)))
        if row.phase.has_ended:
            return row
        if not row.supervised:
            return read_unsupervised(self.home.run(row.run_id)) or row
        attempt = self.home.run(row.run_id).attempt(row.attempt)
        status = read_status(attempt)
        if status.alive or (status.watchdog is None and status.exit is None):
            # Alive, or so young that nobody has written down who it is.
            return row
        outcome = determine_outcome(read_exit_facts(attempt, self._redact))
        ended = float((status.exit or {}).get("ended") or 0.0) or row.ended
        alarms = tuple(alarm for alarm in row.alarms if alarm.code in LASTING_ALARMS)
        return dataclasses.replace(
            row, phase=outcome.phase, reason=outcome.reason, code=outcome.code, ended=ended, alarms=alarms
        )


def read_lines(attempt: Attempt, offset: int, limit: int, redact: Redactor, *, cut: bool = False) -> LogPiece:
    """Whole lines from a byte on; `cut` says that the first may be half a line, which is left out."""
    try:
        with open(attempt.stdout, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = min(max(0, offset if offset >= 0 else size + offset), size)
            cut = cut or offset < 0
            file.seek(start)
            block = file.read(limit)
            # A line that is not complete is left for later, unless nobody will ever see its end.
            end = block.rfind(b"\n") + 1
            if not end and len(block) == limit:
                block += file.readline(_LONGEST_LINE)
                end = len(block)
            elif end < len(block) and start + len(block) == size and attempt.exit.exists():
                end = len(block)
    except FileNotFoundError:
        return LogPiece("", 0, 0)
    taken = block[:end]
    if cut and start > 0:
        taken = taken[taken.find(b"\n") + 1 :]
    return LogPiece(redact(taken.decode("utf-8", "replace")), start + end, size)


def _age(row: RunRecord) -> tuple[float, str]:
    """What runs are sorted by."""
    return row.created, row.run_id


def _before(phases: Collection[Phase] | None) -> Collection[Phase] | None:
    """The phases a row may have that is now in one of these: what lived when the service looked may have ended."""
    if phases is None:
        return None
    return {*phases, *(phase for phase in Phase if phase.has_process)}


def _tells(row: RunRecord, words: Collection[str]) -> bool:
    text = "\n".join((row.run_id, row.agent_id, row.env_id, *row.tags, row.reason)).lower() if words else ""
    return all(word in text for word in words)


def _several(prefix: str, ids: list[str]) -> UnknownRun:
    return UnknownRun("run", prefix, "is a prefix of several runs", f"Which of {', '.join(ids)}?")
