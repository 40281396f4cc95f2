"""The runs of the service: a table that can be searched, filtered and sorted, the runs that the user has chosen, and
the load of the machine that they share.
"""

from __future__ import annotations

import math
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from palaestra.runs.phase import Phase
from palaestra.runs.record import RunRecord
from palaestra.studio.model.revision import Revised

if TYPE_CHECKING:
    from palaestra.runs.machine import MachineUsage

TONES: dict[Phase, str] = {
    Phase.QUEUED: "muted",
    Phase.STARTING: "info",
    Phase.RUNNING: "info",
    Phase.STOPPING: "warning",
    Phase.SUCCEEDED: "success",
    Phase.FAILED: "danger",
    Phase.STOPPED: "muted",
    Phase.KILLED: "danger",
    Phase.LOST: "danger",
    Phase.STALLED: "warning",
    Phase.REFUSED: "danger",
}
_KEYS = ("phase", "env", "agent", "runner", "tag", "seed", "favorite")
"""Words of a search that name a column: `env:CartPole phase:failed`."""
_MAX_SAMPLES = 120


@dataclass(frozen=True)
class RunColumn:
    """A column of the table."""

    name: str
    title: str
    text: Callable[[RunRecord, float], str]
    """The text of a cell, at a time."""
    sort_key: Callable[[RunRecord, float], Any]
    """What a run is sorted by, at a time; None or NaN comes last in both orders."""
    is_number: bool = False


def elapsed_s(record: RunRecord, now: float) -> float | None:
    """Seconds since a run has started, until its end; None before its start."""
    if record.started is None:
        return None
    return max(0.0, (record.ended if record.ended is not None else now) - record.started)


def remaining_s(record: RunRecord, now: float) -> float | None:
    """Seconds that a live run still needs at its pace so far; None when that is unknown."""
    elapsed = elapsed_s(record, now)
    if record.phase.has_ended or not elapsed or not record.total_steps or record.env_step <= 0:
        return None
    return max(0.0, elapsed * (record.total_steps - record.env_step) / record.env_step)


def progress(record: RunRecord) -> float | None:
    """Share of the steps that a run has made; None when the total is unknown."""
    return min(1.0, record.env_step / record.total_steps) if record.total_steps else None


def format_duration(seconds: float | None) -> str:
    """A duration in two units: `1 h 4 min`; empty when it is unknown."""
    if seconds is None:
        return ""
    whole = int(seconds)
    for size, unit, smaller, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller} {small_unit}"
    return f"{whole} s"


def format_time(unix_time: float) -> str:
    """A moment in the local time: `03 Feb 14:05`; empty for 0."""
    return time.strftime("%d %b %H:%M", time.localtime(unix_time)) if unix_time else ""


def format_count(number: int) -> str:
    """A large number in few characters: `1.23 M`."""
    if number < 10_000:
        return f"{number:,}"
    rounded = float(f"{number:.3g}")
    size, unit = next((size, unit) for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if rounded >= size)
    return f"{rounded / size:,.10g} {unit}"


def status_text(record: RunRecord, now: float) -> str:
    """Phase, time so far and estimate of a run in one line."""
    parts = [str(record.phase.value)]
    duration = format_duration(elapsed_s(record, now))
    if duration:
        parts.append(duration)
    left = remaining_s(record, now)
    if left is not None:
        parts.append(f"about {format_duration(left)} left")
    return " · ".join(parts)


COLUMNS: tuple[RunColumn, ...] = (
    RunColumn("phase", "status", lambda r, now: r.phase.value, lambda r, now: r.phase.value),
    RunColumn("name", "run", lambda r, now: _title(r), lambda r, now: (r.name or r.run_id).lower()),
    RunColumn(
        "return",
        "return",
        lambda r, now: "" if r.episode_return is None else f"{r.episode_return:.4g}",
        lambda r, now: r.episode_return,
        is_number=True,
    ),
    RunColumn("steps", "steps", lambda r, now: format_count(r.env_step), lambda r, now: r.env_step, is_number=True),
    RunColumn(
        "seed", "seed", lambda r, now: "" if r.seed is None else str(r.seed), lambda r, now: r.seed, is_number=True
    ),
    RunColumn("agent", "agent", lambda r, now: r.agent_id, lambda r, now: r.agent_id),
    RunColumn("env", "environment", lambda r, now: r.env_id, lambda r, now: r.env_id),
    RunColumn("time", "time", lambda r, now: format_duration(elapsed_s(r, now)), elapsed_s, is_number=True),
    RunColumn("tags", "tags", lambda r, now: ", ".join(r.tags), lambda r, now: r.tags or None),
    RunColumn("created", "started", lambda r, now: format_time(r.created), lambda r, now: r.created, is_number=True),
)
_BY_NAME = {column.name: column for column in COLUMNS}


class RunsModel(Revised):
    """All runs that the studio knows."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__()
        self._clock = clock
        self._records: dict[str, RunRecord] = {}
        self.search = ""
        self.sort_column = "created"
        self.is_descending = True
        self.current = ""
        """The run whose details are shown; empty without one."""
        self.chosen: tuple[str, ...] = ()
        """The runs whose curves are drawn together."""
        self.is_loaded = False

    def __len__(self) -> int:
        return len(self._records)

    def get(self, run_id: str) -> RunRecord | None:
        """A run by its id."""
        return self._records.get(run_id)

    @property
    def current_record(self) -> RunRecord | None:
        """The run whose details are shown."""
        return self._records.get(self.current)

    def set_all(self, records: Iterable[RunRecord]) -> None:
        """The list of runs has arrived."""
        self._records = {record.run_id: record for record in records}
        self.chosen = tuple(run_id for run_id in self.chosen if run_id in self._records)
        if self.current not in self._records:
            self.current = ""
        self.is_loaded = True
        self.touch()

    def update(self, record: RunRecord) -> None:
        """One run has changed."""
        if self._records.get(record.run_id) != record:
            self._records[record.run_id] = record
            self.touch()

    def remove(self, run_id: str) -> None:
        """A run was deleted."""
        if self._records.pop(run_id, None) is not None:
            self.chosen = tuple(one for one in self.chosen if one != run_id)
            self.current = "" if self.current == run_id else self.current
            self.touch()

    def show(self, run_id: str) -> None:
        """Show the details of a run."""
        if run_id != self.current:
            self.current = run_id
            self.touch()

    def choose(self, run_ids: Sequence[str]) -> None:
        """Draw the curves of these runs together."""
        chosen = tuple(dict.fromkeys(run_id for run_id in run_ids if run_id in self._records))
        if chosen != self.chosen:
            self.chosen = chosen
            self.touch()

    def set_search(self, text: str) -> None:
        """Filter the table."""
        if text != self.search:
            self.search = text
            self.touch()

    def sort_by(self, column: str) -> None:
        """Sort by a column; the same column again turns the order around."""
        if column not in _BY_NAME:
            return
        self.is_descending = not self.is_descending if column == self.sort_column else _BY_NAME[column].is_number
        self.sort_column = column
        self.touch()

    def visible(self) -> list[RunRecord]:
        """The runs of the table, in its order."""
        match, key, now = parse_search(self.search), _BY_NAME[self.sort_column].sort_key, self._clock()
        values = {record.run_id: key(record, now) for record in self._records.values() if match(record)}
        with_value = [run_id for run_id, value in values.items() if not _is_missing(value)]
        without_value = [run_id for run_id, value in values.items() if _is_missing(value)]
        created = {run_id: self._records[run_id].created for run_id in values}
        with_value.sort(key=lambda run_id: (values[run_id], created[run_id], run_id), reverse=self.is_descending)
        without_value.sort(key=lambda run_id: (created[run_id], run_id), reverse=self.is_descending)
        return [self._records[run_id] for run_id in (*with_value, *without_value)]

    def all(self) -> list[RunRecord]:
        """All runs, whatever the search says."""
        return list(self._records.values())

    def live(self) -> list[RunRecord]:
        """The runs that have not ended, oldest first."""
        return sorted((r for r in self._records.values() if not r.phase.has_ended), key=lambda r: r.created)


class MachineModel(Revised):
    """The load of the machine of the service: the newest sample, and the last ones for the gauges."""

    def __init__(self) -> None:
        super().__init__()
        self.usage: MachineUsage | None = None
        self.cpu: deque[float] = deque(maxlen=_MAX_SAMPLES)
        self.memory: deque[float] = deque(maxlen=_MAX_SAMPLES)

    def receive(self, usage: MachineUsage) -> None:
        """A sample has arrived."""
        self.usage = usage
        self.cpu.append(usage.cpu_percent / 100)
        if usage.memory_total_bytes:
            self.memory.append(usage.memory_used_bytes / usage.memory_total_bytes)
        self.touch()


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def parse_search(text: str) -> Callable[[RunRecord], bool]:
    """A filter of runs: words that must occur, and `column:word` for one column; `-word` must not occur."""
    try:
        words = shlex.split(text.lower())
    except ValueError:  # an open quotation mark while the user types
        words = text.lower().replace('"', "").split()
    tests = [_word_test(word) for word in words]
    return lambda record: all(test(record) for test in tests)


def _word_test(word: str) -> Callable[[RunRecord], bool]:
    if word.startswith("-") and len(word) > 1:
        inner = _word_test(word[1:])
        return lambda record: not inner(record)
    key, colon, value = word.partition(":")
    if key == "seed" and value:
        return lambda record: value == _column_text(record, key)
    if colon and key in _KEYS:
        return lambda record: value in _column_text(record, key)
    return lambda record: any(word in text for text in _searched_texts(record))


def _title(record: RunRecord) -> str:
    """The name of a run, or its id; a favorite has a star in front."""
    return f"★ {record.name or record.run_id}" if record.favorite else record.name or record.run_id


def _column_text(record: RunRecord, key: str) -> str:
    texts = {
        "phase": record.phase.value,
        "env": record.env_id,
        "agent": record.agent_id,
        "runner": record.runner,
        "tag": " ".join(record.tags),
        "seed": "" if record.seed is None else str(record.seed),
        "favorite": "yes" if record.favorite else "no",
    }
    return texts[key].lower()


def _searched_texts(record: RunRecord) -> tuple[str, ...]:
    texts = (record.run_id, record.name, record.agent_id, record.env_id, record.phase.value, record.notes, *record.tags)
    return tuple(text.lower() for text in texts)
