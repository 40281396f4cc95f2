"""The details of one run, and what is known of the metrics of the chosen runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from palaestra.runs.record import RunEvent
from palaestra.studio.model.form import flatten
from palaestra.studio.model.revision import Revised

if TYPE_CHECKING:
    from palaestra.runs.comparison import Comparison

MAX_LOG_CHARACTERS = 400_000


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
