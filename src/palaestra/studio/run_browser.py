"""Looking at runs from the window: the table, curves, details, output, and what can be done with a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from palaestra.errors import PalaestraError
from palaestra.runs.client.client import TrainerService
from palaestra.runs.comparison import Comparison
from palaestra.runs.phase import PhaseEvent
from palaestra.runs.record import BeliefHistory, RunEvent, RunRecord
from palaestra.runs.series import MetricPoint
from palaestra.studio.model.chart import REQUEST_POINTS, Charts, CurveSource
from palaestra.studio.model.details import BeliefsModel, RunDetails
from palaestra.studio.model.runs import RunsModel
from palaestra.studio.request import Requests

_USUAL = (
    "episode_return",
    "episode/return",
    "policy_loss",
    "value_loss",
    "entropy",
    "success_rate",
    "loss",
    "q_values",
)
"""Metrics that are drawn first, if a run has them."""
_MAX_CHARTS = 6
_LOG_TAIL_BYTES = 1 << 16


class RunBrowser:
    """The runs of the service, and the curves and details of those that the user has chosen."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self.runs = RunsModel()
        self.charts = Charts()
        self.details = RunDetails()
        self.beliefs = BeliefsModel()
        self.on_run_changed: list[Callable[[RunRecord], None]] = []

    # ------------------------------------------------------------------ the table

    def refresh(self) -> None:
        """Read the list of runs."""

        def receive(records: Sequence[RunRecord]) -> None:
            self.runs.set_all(records)
            self._follow_choice()

        self._requests.ask("The runs cannot be listed", lambda service: service.runs(), receive, key="runs")

    def handle_event(self, run_id: str, event: RunEvent) -> None:
        """Something happened to a run: read its record again."""
        self.read_run(run_id)
        if run_id == self.runs.current:
            self.details.add_event(run_id, event)
            if event.kind == PhaseEvent.LAUNCHED and event.attempt > 1:
                # The output of the new attempt is another stream.
                self._requests.feed.watch_log("")
                self._requests.feed.watch_log(run_id)

    def read_run(self, run_id: str) -> None:
        """Read the record of a run."""

        def receive(record: RunRecord) -> None:
            self.runs.update(record)
            for notify in self.on_run_changed:
                notify(record)

        self._requests.ask(
            f"{run_id} cannot be read", lambda service: service.run(run_id), receive, key=f"run {run_id}"
        )

    def refresh_live(self) -> None:
        """Read the records of the runs that have not ended, for their progress."""
        for record in self.runs.live():
            self.read_run(record.run_id)

    # ------------------------------------------------------------------ curves

    def show(self, run_id: str) -> None:
        """Show the details of a run, and its curves unless others are chosen."""
        self.runs.show(run_id)
        if run_id and run_id not in self.runs.chosen:
            self.runs.choose((run_id,))
        self._follow_choice()
        self._read_details()

    def choose(self, run_ids: Sequence[str]) -> None:
        """Draw the curves of these runs together."""
        self.runs.choose(run_ids)
        self._follow_choice()
        if len(self.runs.chosen) > 1:
            self.compare()

    def _follow_choice(self) -> None:
        records = [record for run_id in self.runs.chosen if (record := self.runs.get(run_id)) is not None]
        self.charts.set_sources([to_source(record) for record in records])
        self._requests.feed.watch_metrics([record.run_id for record in records])
        for record in records:
            self._read_names(record.run_id)

    def _read_names(self, run_id: str, *, again: bool = False) -> None:
        def receive(names: Mapping[str, object]) -> None:
            self.details.set_metrics(run_id, names)
            self.details.choose_charts(_usual_metrics(names))
            if again:
                self._read_curves(run_id, self._wanted_metrics(run_id))
            self.load_curves()

        self._requests.ask(
            "The metrics cannot be listed",
            lambda service: service.metric_names(run_id),
            receive,
            key=f"names {run_id}",
        )

    def add_chart(self, metric: str) -> None:
        """Draw a metric."""
        self.details.add_chart(metric)
        self.load_curves()

    def load_curves(self) -> None:
        """Read the curves that the charts need and do not have."""
        for run_id in self.runs.chosen:
            wanted = self._wanted_metrics(run_id)
            self._read_curves(run_id, [name for name in wanted if not self.charts.has_curve(run_id, name)])

    def _wanted_metrics(self, run_id: str) -> list[str]:
        known = self.details.metrics_of(run_id)
        return [name for name in (*self.details.charts, "episodes") if name in known]

    def _read_curves(self, run_id: str, names: Sequence[str]) -> None:
        if not names:
            return
        for name in names:
            self.charts.expect(run_id, name)

        def fail(error: PalaestraError) -> None:
            # The next refresh tries again.
            self.charts.discard(run_id, names)

        def receive(series: Mapping[str, Sequence[MetricPoint]]) -> None:
            for name, points in series.items():
                self.charts.set_curve(run_id, name, points)

        self._requests.ask(
            "The curves cannot be read",
            lambda service: service.metric_series(run_id, list(names), points=REQUEST_POINTS),
            receive,
            failed=fail,
        )

    def load_detail(self, metric: str, first: float, last: float) -> None:
        """Read a part of the curves of a metric in more detail, after the user has zoomed in."""
        if self.charts.options.x_axis != "step":
            return
        for run_id in self.runs.chosen:
            self._read_detail(run_id, metric, int(first), int(last))

    def _read_detail(self, run_id: str, metric: str, first: int, last: int) -> None:
        self._requests.ask(
            "The curves cannot be read",
            lambda service: service.metric_series(run_id, [metric], points=REQUEST_POINTS, first=first, last=last),
            lambda series: self.charts.set_detail(run_id, metric, series.get(metric, ())),
            key=f"detail {run_id} {metric}",
            failed=lambda error: None,
        )

    # ------------------------------------------------------------------ details

    def _read_details(self) -> None:
        run_id = self.runs.current
        self.details.open(run_id)
        if not run_id:
            self._requests.feed.watch_log("")
            return
        ask = self._requests.ask
        ask("Its events cannot be read", lambda s: s.run_events(run_id), lambda e: self.details.set_events(run_id, e))
        ask(
            "Its command cannot be read", lambda s: s.run_command(run_id), lambda c: self.details.set_command(run_id, c)
        )
        ask("Its settings cannot be read", lambda s: s.resolved(run_id), lambda c: self.details.set_config(run_id, c))
        ask("Its videos cannot be listed", lambda s: s.videos(run_id), lambda v: self.details.set_videos(run_id, v))
        self._requests.feed.watch_log(run_id, -_LOG_TAIL_BYTES)

    def read_beliefs(self) -> None:
        """Read what the agent of the current run believes now; called once a second while a runner reports it."""
        record = self.runs.current_record
        self.beliefs.open("" if record is None else record.run_id)
        if record is None or self.beliefs.is_complete:
            return
        run_id, has_ended, after = record.run_id, record.phase.has_ended, self.beliefs.next

        def receive(history: BeliefHistory) -> None:
            self.beliefs.add(run_id, history, has_ended=has_ended)

        self._requests.ask(
            "The beliefs cannot be read",
            lambda service: service.beliefs(run_id, after),
            receive,
            key="beliefs",
            failed=lambda error: None,
        )

    def receive_log(self, run_id: str, text: str) -> None:
        """New output of a run."""
        self.details.append_log(run_id, text)

    def receive_points(self, run_id: str, points: Mapping[str, Sequence[MetricPoint]]) -> None:
        """New points of a run; metrics that it did not have before are offered from now on.

        Without points, the stored curves hold more than what arrived: they are read again.
        """
        if not points:
            self._read_names(run_id, again=True)
            return
        self.charts.append(run_id, points)
        if self.details.add_metrics(run_id, points):
            self.details.choose_charts(_usual_metrics(self.details.metrics_of(run_id)))
            self.load_curves()

    def compare(self) -> None:
        """Read the differences of the chosen runs."""
        run_ids = list(self.runs.chosen)

        def receive(comparison: Comparison) -> None:
            self.details.set_comparison(comparison)

        if 2 <= len(run_ids) <= 50:
            self._requests.ask(
                "The runs cannot be compared", lambda service: service.compare(run_ids), receive, key="compare"
            )

    # ------------------------------------------------------------------ what can be done with a run

    def stop(self, run_id: str) -> None:
        """Stop a run."""
        self._act(run_id, "was not stopped", lambda service: service.stop_run(run_id))

    def resume(self, run_id: str) -> None:
        """Resume a run that has ended."""
        self._act(run_id, "was not resumed", lambda service: service.resume_run(run_id))

    def edit(self, run_id: str, **changes: object) -> None:
        """Change name, tags or notes of a run, or whether it is a favorite."""
        self._act(run_id, "was not changed", lambda service: service.update_run(run_id, **changes))  # type: ignore[arg-type]

    def delete(self, run_id: str) -> None:
        """Move a run to the trash; the notice offers to restore it."""

        def finish(_: object) -> None:
            self.runs.remove(run_id)
            self._follow_choice()
            self._requests.notices.add(
                "info", f"{run_id} was deleted.", action="Undo", perform=lambda: self.restore(run_id)
            )

        self._requests.ask(f"{run_id} was not deleted", lambda service: service.delete_run(run_id), finish)

    def restore(self, run_id: str) -> None:
        """Bring a deleted or archived run back."""
        self._act(run_id, "was not restored", lambda service: service.restore_run(run_id))

    def archive(self, run_id: str) -> None:
        """Pack a run that has ended."""
        self._act(run_id, "was not archived", lambda service: service.archive_run(run_id))

    def record_video(self, run_id: str) -> None:
        """Record a clip of the newest checkpoint."""
        self._requests.notices.add("info", f"Recording a clip of {run_id} …", key=f"record {run_id}")
        self._requests.ask(
            "The clip was not recorded",
            lambda service: service.record_video(run_id),
            lambda _: self._read_details(),
        )

    def open_tensorboard(self, open_url: Callable[[str], None]) -> None:
        """Start TensorBoard on the chosen runs, and open it."""
        run_ids = list(self.runs.chosen) or [self.runs.current]
        self._requests.notices.add("info", "Starting TensorBoard …", key="tensorboard")
        self._requests.ask("TensorBoard was not started", lambda service: service.tensorboard(run_ids), open_url)

    def open_tracking(self, open_url: Callable[[str], None]) -> None:
        """Open the page of the run on W&B, or say how to upload it."""
        run_id = self.runs.current

        def receive(tracking: object) -> None:
            url, command = getattr(tracking, "url", ""), getattr(tracking, "command", "")
            if url:
                open_url(url)
            else:
                self._requests.notices.add("info", f"{run_id} is not on W&B.", command or "Start it with tracking on.")

        self._requests.ask("W&B cannot be asked", lambda service: service.tracking(run_id), receive)

    def _act(self, run_id: str, what: str, work: Callable[[TrainerService], RunRecord]) -> None:
        def fail(error: PalaestraError) -> None:
            self._requests.notices.add("error", f"{run_id} {what}.", str(error))
            self.read_run(run_id)

        self._requests.ask(f"{run_id} {what}", work, self.runs.update, failed=fail)


def to_source(record: RunRecord) -> CurveSource:
    """A run as the charts know it."""
    seed = "" if record.seed is None else f" · seed {record.seed}"
    label = record.name or f"{record.agent_id} {record.env_id}{seed}"
    group = record.config_digest or record.run_id
    return CurveSource(record.run_id, label, group, record.started or record.created or time.time())


def _usual_metrics(names: Mapping[str, object]) -> list[str]:
    usual = [name for name in _USUAL if name in names]
    others = sorted(name for name in names if name not in usual and not name.startswith(("time/", "episode")))
    return [*usual, *others][:_MAX_CHARTS]
