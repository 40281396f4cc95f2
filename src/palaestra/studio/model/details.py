"""The details of one run, the beliefs of its agent, and what is known of the metrics of the chosen runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from palaestra.runs.record import BeliefHistory, BeliefRecord, RunEvent
from palaestra.studio.model.form import flatten
from palaestra.studio.model.revision import Revised

if TYPE_CHECKING:
    from palaestra.runs.comparison import Comparison

MAX_LOG_CHARACTERS = 400_000
_MAX_SNAPSHOTS = 1000
_MAX_TEXT = 300


class RunDetails(Revised):
    """Events, command, settings, videos and output of the current run; the metrics and charts of the chosen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.run_id = ""
        self.charts: tuple[str, ...] = ()
        """Metrics that are drawn, in their order."""
        self.comparison: Comparison | None = None
        self._metrics: dict[str, dict[str, object]] = {}
        self._is_chosen_by_user = False
        self._clear()

    def _clear(self) -> None:
        self.events: tuple[RunEvent, ...] = ()
        self.command: Mapping[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.videos: tuple[Any, ...] = ()
        self.log = ""
        self.log_start = 0
        """Characters of the output that are no longer kept."""

    def open(self, run_id: str) -> None:
        """Show another run."""
        if run_id != self.run_id:
            self.run_id = run_id
            self._clear()
            self.touch()

    def set_events(self, run_id: str, events: Sequence[RunEvent]) -> None:
        """The events of the run have arrived; later ones that arrived before them stay."""
        if run_id == self.run_id:
            by_number = {event.seq: event for event in (*self.events, *events)}
            self.events = tuple(by_number[number] for number in sorted(by_number))
            self.touch()

    def add_event(self, run_id: str, event: RunEvent) -> None:
        """Something happened to the run."""
        if run_id == self.run_id and event.seq not in {one.seq for one in self.events}:
            self.set_events(run_id, (event,))

    def set_command(self, run_id: str, command: Mapping[str, Any]) -> None:
        """The command of the run has arrived."""
        if run_id == self.run_id:
            self.command = command
            self.touch()

    def set_config(self, run_id: str, config: Mapping[str, Any]) -> None:
        """The settings of the run have arrived."""
        if run_id == self.run_id:
            self.config = {
                key: value for key, value in flatten(config).items() if not (isinstance(value, Mapping) and value)
            }
            self.touch()

    def set_videos(self, run_id: str, videos: Sequence[Any]) -> None:
        """The videos of the run have arrived."""
        if run_id == self.run_id:
            self.videos = tuple(videos)
            self.touch()

    def append_log(self, run_id: str, text: str) -> None:
        """New output of the run; of very much, the newest is kept."""
        if run_id == self.run_id and text:
            whole = self.log + text
            cut = max(0, len(whole) - MAX_LOG_CHARACTERS)
            if cut:
                cut = whole.find("\n", cut) + 1 or cut
            self.log, self.log_start = whole[cut:], self.log_start + cut
            self.touch()

    def set_comparison(self, comparison: Comparison) -> None:
        """The differences of the chosen runs have arrived."""
        self.comparison = comparison
        self.touch()

    # ------------------------------------------------------------------ metrics

    def set_metrics(self, run_id: str, metrics: Mapping[str, object]) -> None:
        """The metrics of a run have arrived; new ones of which points arrived before them stay."""
        self._metrics[run_id] = {**self._metrics.get(run_id, {}), **metrics}
        self.touch()

    def add_metrics(self, run_id: str, names: Iterable[str]) -> bool:
        """Metrics of which points arrived; whether one is new."""
        known = self._metrics.setdefault(run_id, {})
        new = [name for name in names if name not in known]
        known.update(dict.fromkeys(new))
        if new:
            self.touch()
        return bool(new)

    def metrics_of(self, run_id: str) -> Mapping[str, object]:
        """The metrics of a run."""
        return self._metrics.get(run_id, {})

    def all_metrics(self, run_ids: Iterable[str]) -> list[str]:
        """The metrics of several runs."""
        return sorted({name for run_id in run_ids for name in self._metrics.get(run_id, {})})

    def choose_charts(self, metrics: Sequence[str]) -> None:
        """Draw these metrics, unless the user has chosen others."""
        if not self._is_chosen_by_user and tuple(metrics) != self.charts and metrics:
            self.charts = tuple(metrics)
            self.touch()

    def add_chart(self, metric: str) -> None:
        """The user wants to see a metric."""
        self._is_chosen_by_user = True
        if metric not in self.charts:
            self.charts = (*self.charts, metric)
            self.touch()

    def remove_chart(self, metric: str) -> None:
        """The user no longer wants to see a metric."""
        self._is_chosen_by_user = True
        self.charts = tuple(one for one in self.charts if one != metric)
        self.touch()


@dataclass(frozen=True)
class Intention:
    """A goal that the agent pursues, and the plan by which it does."""

    goal: str
    plan: str


@dataclass(frozen=True)
class BeliefSnapshot:
    """Beliefs and intentions of an agent at one time."""

    seq: int
    time: float
    agent: str
    beliefs: tuple[str, ...]
    intentions: tuple[Intention, ...]
    plan: str
    """The plan that chose the last action; empty when none is known."""
    confidence: float | None
    episode: int | None
    step: int | None
    q_values: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, record: BeliefRecord) -> BeliefSnapshot:
        """A record in the form in which it is shown; parts of an unexpected kind are left out."""
        content = record.beliefs
        confidence: Any = content.get("confidence")
        return cls(
            seq=record.seq,
            time=record.time,
            agent=record.agent,
            beliefs=_read_beliefs(content.get("beliefs", {k: v for k, v in content.items() if k not in _KEYS})),
            intentions=tuple(map(_read_intention, _read_list(content.get("intentions")))),
            plan=_to_text(content.get("plan")),
            confidence=float(confidence) if _is_number(confidence) and 0 <= confidence <= 1 else None,
            episode=_read_count(content.get("episode")),
            step=_read_count(content.get("step")),
            q_values=_read_table(content.get("q_values")),
        )

    @property
    def moment(self) -> str:
        """Episode and step in words; empty when they are unknown."""
        parts = (("episode", self.episode), ("step", self.step))
        return " · ".join(f"{name} {number:,}" for name, number in parts if number is not None)


_KEYS = ("intentions", "plan", "confidence", "episode", "step", "q_values")


class BeliefsModel(Revised):
    """The snapshots of one run: the newest, or the one that the user has gone back to."""

    def __init__(self) -> None:
        super().__init__()
        self.run_id = ""
        self._clear()

    def _clear(self) -> None:
        self.next = ""
        """Cursor from which the service continues."""
        self.is_complete = False
        """Whether the run has ended and everything has arrived."""
        self._snapshots: list[BeliefSnapshot] = []
        self._position: int | None = None
        """The number of the snapshot that is shown; None follows the newest."""
        self._q_values: dict[str, tuple[tuple[float, ...], ...]] = {}

    def open(self, run_id: str) -> None:
        """Show another run."""
        if run_id != self.run_id:
            self.run_id = run_id
            self._clear()
            self.touch()

    def add(self, run_id: str, history: BeliefHistory, *, has_ended: bool) -> None:
        """New records have arrived; `has_ended` says whether the run had ended before they were read."""
        if run_id != self.run_id:
            return
        if self.next and _attempt(self.next) != _attempt(history.next):
            self._clear()  # the agent of a resumed attempt begins again
            self.touch()
        self.next = history.next
        self.is_complete = has_ended and not history.records
        for record in history.records:
            snapshot = BeliefSnapshot.of(record)
            self._snapshots.append(snapshot)
            if snapshot.q_values:
                self._q_values[snapshot.agent] = snapshot.q_values
        excess = len(self._snapshots) - _MAX_SNAPSHOTS
        if excess > 0:
            del self._snapshots[:excess]
            self._position = None if self._position is None else max(0, self._position - excess)
        if history.records:
            self.touch()

    def __len__(self) -> int:
        return len(self._snapshots)

    @property
    def is_following(self) -> bool:
        """Whether the newest snapshot is shown."""
        return self._position is None

    @property
    def position(self) -> int:
        """The number of the snapshot that is shown, from 0."""
        return len(self._snapshots) - 1 if self._position is None else self._position

    @property
    def current(self) -> BeliefSnapshot | None:
        """The snapshot that is shown."""
        return self._snapshots[self.position] if self._snapshots else None

    @property
    def q_values(self) -> tuple[tuple[float, ...], ...]:
        """The newest action values of the agent that is shown; they are not kept for earlier snapshots."""
        return () if self.current is None else self._q_values.get(self.current.agent, ())

    def new_beliefs(self) -> frozenset[str]:
        """The beliefs of the shown snapshot that the agent did not have in its snapshot before."""
        current = self.current
        if current is None:
            return frozenset()
        for earlier in reversed(self._snapshots[: self.position]):
            if earlier.agent == current.agent:
                return frozenset(current.beliefs) - frozenset(earlier.beliefs)
        return frozenset()

    def seek(self, position: int) -> None:
        """Show a snapshot; the last one follows the run again."""
        last = len(self._snapshots) - 1
        position = max(0, min(position, last))
        self._position = None if position >= last else position
        self.touch()


def _attempt(position: str) -> str:
    return position.partition(":")[0]


def _read_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _read_beliefs(value: Any) -> tuple[str, ...]:
    if isinstance(value, Mapping):
        return tuple(f"{name}: {_to_text(content)}" for name, content in value.items())
    return tuple(map(_to_text, _read_list(value)))


def _read_intention(value: Any) -> Intention:
    if isinstance(value, Mapping):
        return Intention(_to_text(value.get("goal")), _to_text(value.get("plan")))
    return Intention(_to_text(value), "")


def _read_table(value: Any) -> tuple[tuple[float, ...], ...]:
    rows = _read_list(value)
    width = len(rows[0]) if rows and isinstance(rows[0], list) else 0
    if not width or any(not isinstance(r, list) or len(r) != width or not all(map(_is_number, r)) for r in rows):
        return ()
    return tuple(tuple(map(float, row)) for row in rows)


def _read_count(value: Any) -> int | None:
    return int(value) if _is_number(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _to_text(value: Any) -> str:
    return "" if value is None else str(value)[:_MAX_TEXT]
