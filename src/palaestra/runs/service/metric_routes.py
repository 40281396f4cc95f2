"""Routes that return metrics, output, resource usage and videos of a run."""

# No `from __future__ import annotations`: FastAPI evaluates the annotations.
import mimetypes
from collections.abc import Mapping, Sequence
from typing import Annotated, TypeAlias

from fastapi import FastAPI, Path, Query
from fastapi.responses import StreamingResponse
from pydantic import Field, StringConstraints

from palaestra.errors import UnknownRun
from palaestra.runs.process.resource_usage import ResourceSample, read_samples
from palaestra.runs.reader import RunReader
from palaestra.runs.record import BeliefHistory
from palaestra.runs.series import MetricPoint
from palaestra.runs.service.artifact_routes import RangeHeader, describe_file, send_file
from palaestra.runs.service.schemas import (
    NOT_FOUND,
    AttemptNumber,
    LogOffset,
    RequestBody,
    ResponseBody,
    RunId,
    new_router,
)
from palaestra.runs.tools.tensorboard import export_tensorboard
from palaestra.runs.video.clip import NamedClip, list_clips
from palaestra.runs.video.record_video import record_run
from palaestra.runs.wire import JsonObject, Number, to_json
from palaestra.strict_json import json_number

# Bounded so that the names fit into the request line.
_MetricNames = Annotated[list[Annotated[str, StringConstraints(max_length=100)]] | None, Query(max_length=32)]
_Step = Annotated[int | None, Query(ge=-(2**63), lt=2**63)]

MetricSeries: TypeAlias = dict[str, list[Annotated[list[Number], Field(min_length=3, max_length=3)]]]
"""Points by metric name; each point is a step, a value and a unix time."""


class LogResponse(ResponseBody):
    """Whole lines of a run's output."""

    text: str
    offset: int
    """Offset of the next line, to continue from."""
    size: int
    ended: bool
    """Whether the run has ended, so that no more output will follow."""


class MetricResponse(ResponseBody):
    """One metric of a run."""

    points: int
    source: str
    """Source of the numbers: `journal`, `tensorboard:losses/value_loss`, `stdout:events`."""


class ExportBody(RequestBody):
    """Where to write event files."""

    into: Annotated[str | None, Field(min_length=1, max_length=4096)] = None
    """A directory on the service's machine; null uses the run's own."""


class ExportResponse(ResponseBody):
    """Event files that were written."""

    directory: str
    points: int


class VideoBody(RequestBody):
    """How to record a clip."""

    checkpoint_id: Annotated[str | None, Field(pattern=r"^[0-9a-f]+$", max_length=64)] = None
    """Null uses the newest checkpoint of the run."""
    frames: Annotated[int, Field(ge=1, le=200)] = 200
    """Maximum number of frames."""


def add_metric_routes(app: FastAPI, reader: RunReader) -> None:
    """Add the routes of metrics, output and resource usage to the application."""
    metrics_router = new_router("metrics")
    runs_router = new_router("runs")

    @metrics_router.get("/runs/{run_id}/metrics", responses=NOT_FOUND)
    def metric_names(run_id: RunId) -> dict[str, MetricResponse]:
        """All metrics of a run by name."""
        metrics = reader.metric_names(run_id)
        return {name: MetricResponse(points=info.points, source=info.source) for name, info in metrics.items()}

    @metrics_router.get("/runs/{run_id}/metrics/recent", responses=NOT_FOUND, response_model=MetricSeries)
    def recent_metrics(
        run_id: RunId, count: Annotated[int, Query(ge=1, le=100_000)] = 100, name: _MetricNames = None
    ) -> JsonObject:
        """The last points of the named metrics (default: of all metrics)."""
        return _series_to_json(reader.recent_metrics(run_id, count, name or ()))

    @metrics_router.get("/runs/{run_id}/metrics/series", responses=NOT_FOUND, response_model=MetricSeries)
    def metric_series(
        run_id: RunId,
        name: _MetricNames = None,
        points: Annotated[int, Query(ge=4, le=100_000)] = 2000,
        first: _Step = None,
        last: _Step = None,
    ) -> JsonObject:
        """At most `points` points of each metric between two steps, including the extremes of every interval."""
        return _series_to_json(reader.metrics(run_id, name or (), points=points, first=first, last=last))

    @metrics_router.get("/runs/{run_id}/beliefs", responses=NOT_FOUND, response_model=BeliefHistory)
    def beliefs(
        run_id: RunId,
        after: Annotated[str, Query(pattern=r"^(\d{1,9}:\d{1,18})?$")] = "",
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> JsonObject:
        """The last beliefs of the agents of a run, or those after `next` of an earlier response.

        Only runners with the capability `live_beliefs` report them.
        """
        return to_json(reader.beliefs(run_id, after, limit))

    @runs_router.get("/runs/{run_id}/log", responses=NOT_FOUND)
    def log(
        run_id: RunId,
        offset: LogOffset = 0,
        limit: Annotated[int, Query(ge=1, le=1 << 22)] = 1 << 20,
        attempt: AttemptNumber = None,
    ) -> LogResponse:
        """Whole lines of the output from a byte offset; a negative offset counts from the end."""
        ended = reader.run(run_id).phase.has_ended
        chunk = reader.log(run_id, offset, limit, attempt)
        return LogResponse(text=chunk.text, offset=chunk.offset, size=chunk.size, ended=ended)

    @metrics_router.get("/runs/{run_id}/system", responses=NOT_FOUND, response_model=list[ResourceSample])
    def system(
        run_id: RunId, last: Annotated[int | None, Query(ge=1, le=100_000)] = None, attempt: AttemptNumber = None
    ) -> list[JsonObject]:
        """CPU, memory and GPU usage of the run, sampled every few seconds."""
        directory = reader.attempt(run_id, attempt)
        return [] if directory is None else [to_json(sample) for sample in read_samples(directory, last)]

    @metrics_router.post("/runs/{run_id}/export-tensorboard", responses=NOT_FOUND)
    def export(run_id: RunId, body: ExportBody) -> ExportResponse:
        """Write event files for TensorBoard, for runs of every runner."""
        report = export_tensorboard(reader.paths(run_id), body.into)
        return ExportResponse(directory=str(report.directory), points=report.points)

    app.include_router(metrics_router)
    app.include_router(runs_router)


def add_video_routes(app: FastAPI, reader: RunReader) -> None:
    """Add the routes of videos to the application."""
    tools_router = new_router("tools")

    @tools_router.get("/runs/{run_id}/videos", responses=NOT_FOUND, response_model=list[NamedClip])
    def videos(run_id: RunId) -> list[JsonObject]:
        """Clips of a run, newest first."""
        run = reader.paths(run_id)
        return [to_json(NamedClip.of(clip, run)) for clip in list_clips(run)]

    @tools_router.get(
        "/runs/{run_id}/videos/{name:path}",
        response_class=StreamingResponse,
        responses=describe_file("the clip", "video/webm", "video/mp4", "image/gif"),
    )
    def video(
        run_id: RunId, name: Annotated[str, Path(max_length=1000)], wanted: RangeHeader = None
    ) -> StreamingResponse:
        """The file of a clip, by its `name` in the list, or the part that a `Range` header names."""
        run = reader.paths(run_id)
        # Only listed clips: the name must not reach other files of the run.
        clip = next((clip for clip in list_clips(run) if name == NamedClip.of(clip, run).name), None)
        if clip is None:
            raise UnknownRun("video", name, "the run has no such clip", f"GET /runs/{run.run_id}/videos lists them")
        media_type = mimetypes.guess_type(clip.path)[0] or "application/octet-stream"
        return send_file(open(clip.path, "rb"), media_type, wanted)

    @tools_router.post("/runs/{run_id}/videos", status_code=201, responses=NOT_FOUND, response_model=NamedClip)
    def record_video(run_id: RunId, body: VideoBody) -> JsonObject:
        """Play a checkpoint and record a clip, in separate processes. Returns when the clip is complete."""
        run = reader.paths(run_id)
        return to_json(NamedClip.of(record_run(reader.home, run, body.checkpoint_id, body.frames), run))

    app.include_router(tools_router)


def _series_to_json(series: Mapping[str, Sequence[MetricPoint]]) -> JsonObject:
    return {name: [(step, json_number(value), time) for step, value, time in points] for name, points in series.items()}
