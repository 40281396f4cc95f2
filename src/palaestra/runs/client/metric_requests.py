"""Requests about the numbers of runs: metrics, resource usage, TensorBoard and W&B."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from palaestra.runs.client.requests import ServiceRequests, quote
from palaestra.runs.client.server_events import ServerEvent, ServerEvents
from palaestra.runs.record import BeliefHistory
from palaestra.runs.series import MetricInfo, MetricPoint
from palaestra.runs.wire import JsonObject, from_json

if TYPE_CHECKING:
    from palaestra.runs.process.resource_usage import ResourceSample
    from palaestra.runs.tools.wandb import Tracking


class MetricRequests(ServiceRequests):
    """What the client can do with the numbers of runs."""

    def metric_names(self, run_id: str) -> dict[str, MetricInfo]:
        """All metrics of a run by name, with their number of points and source."""
        metrics = self.request("GET", f"/runs/{quote(run_id)}/metrics")
        return {name: MetricInfo(int(info["points"]), str(info["source"])) for name, info in metrics.items()}

    def recent_metrics(self, run_id: str, count: int, names: Sequence[str] = ()) -> dict[str, list[MetricPoint]]:
        """The last points of the named metrics (default: of all metrics)."""
        path = f"/runs/{quote(run_id)}/metrics/recent"
        return _read_points(self.request("GET", path, count=count, name=list(names)))

    def metrics(
        self, run_id: str, name: str, *, points: int = 2000, first: int | None = None, last: int | None = None
    ) -> list[MetricPoint]:
        """At most `points` points of a metric between two steps, including the extremes."""
        return self.metric_series(run_id, [name], points=points, first=first, last=last)[name]

    def metric_series(
        self,
        run_id: str,
        names: Sequence[str] = (),
        *,
        points: int = 2000,
        first: int | None = None,
        last: int | None = None,
    ) -> dict[str, list[MetricPoint]]:
        """At most `points` points of each named metric (default: of all metrics) between two steps."""
        path = f"/runs/{quote(run_id)}/metrics/series"
        return _read_points(self.request("GET", path, name=list(names), points=points, first=first, last=last))

    def watch_metrics(self, run_ids: Sequence[str]) -> ServerEvents[tuple[str, dict[str, list[MetricPoint]]]]:
        """Run id and new points of up to 64 runs, from now on; ends with the connection.

        Without points, the item says that the stored series of the run have everything up to now: load them with
        `metric_series`. It comes first for every run, when a resumed attempt replaces points, and when a run has ended.
        """

        def convert(event: ServerEvent) -> tuple[str, dict[str, list[MetricPoint]]]:
            data = json.loads(event.data)
            return str(data["run_id"]), _read_points(data.get("points", {}))

        return self._stream("/stream/metrics", {"run": list(run_ids)}, convert, resumes=False)

    def beliefs(self, run_id: str, after: str = "", *, limit: int = 100) -> BeliefHistory:
        """The last beliefs of the agents of a run, or those after `next` of an earlier answer."""
        return from_json(BeliefHistory, self.request("GET", f"/runs/{quote(run_id)}/beliefs", after=after, limit=limit))

    def system(self, run_id: str, *, last: int | None = None, attempt: int | None = None) -> list[ResourceSample]:
        """CPU, memory and GPU usage of an attempt (default: the newest), oldest first."""
        from palaestra.runs.process.resource_usage import ResourceSample

        rows = self.request("GET", f"/runs/{quote(run_id)}/system", last=last, attempt=attempt)
        return [from_json(ResourceSample, row) for row in rows]

    def tensorboard(self, run_ids: Sequence[str]) -> str:
        """Start a TensorBoard on these runs, or reuse the one that shows them; returns its URL."""
        return str(self.request("POST", "/tools/tensorboard", {"run_ids": list(run_ids)})["url"])

    def tracking(self, run_id: str) -> Tracking:
        """The URL of a run on W&B, or the command that uploads an offline run."""
        from palaestra.runs.tools.wandb import Tracking

        return from_json(Tracking, self.request("GET", f"/runs/{quote(run_id)}/tracking"))

    def export_to_tensorboard(self, run_id: str, into: Path | str | None = None) -> Path:
        """Write event files for TensorBoard and return their directory."""
        body = {"into": None if into is None else str(Path(into).resolve())}
        return Path(self.request("POST", f"/runs/{quote(run_id)}/export-tensorboard", body)["directory"])


def _read_points(data: JsonObject) -> dict[str, list[MetricPoint]]:
    return {
        name: [MetricPoint(int(step), float(value), float(at)) for step, value, at in points]
        for name, points in data.items()
    }
