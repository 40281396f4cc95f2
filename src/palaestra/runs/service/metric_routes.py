"""Routes that answer numbers, output and samples of a run."""

# Annotations are evaluated here: FastAPI reads them.
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import FastAPI, Query
from pydantic import StringConstraints

from palaestra.runs.process.resource_usage import read_samples
from palaestra.runs.reader import RunReader
from palaestra.runs.series import MetricPoint
from palaestra.runs.service.answers import RunId, errors
from palaestra.runs.service.documents import Export, Into, LogDocument, MetricDocument, Points, SampleDocument
from palaestra.strict_json import json_number

__all__ = ["add_metric_routes"]

# Bounded so that what fits here also fits into the first line of a request.
_Names = Annotated[list[Annotated[str, StringConstraints(max_length=100)]] | None, Query(max_length=32)]
_Step = Annotated[int | None, Query(ge=-(2**63), lt=2**63)]


def add_metric_routes(app: FastAPI, reading: RunReader) -> None:
    """Add them."""

    @app.get("/runs/{run_id}/metrics", operation_id="metric_names", tags=["metrics"], responses=errors(404))
    def metric_names(run_id: RunId) -> dict[str, MetricDocument]:
        """Every metric, with its number of points and where they come from."""
        found = reading.metric_names(run_id)
        return {name: MetricDocument(points=info.points, source=info.source) for name, info in found.items()}

    @app.get(
        "/runs/{run_id}/metrics/recent", operation_id="recent_metrics", tags=["metrics"], responses=errors(404),
        response_model=Points,
    )  # fmt: skip
    def recent_metrics(run_id: RunId, count: Annotated[int, Query(ge=1, le=100_000)] = 100, name: _Names = None) -> Any:
        """The last points of the named metrics; of all, when none is named."""
        return _wire(reading.recent_metrics(run_id, count, name or ()))

    @app.get(
        "/runs/{run_id}/metrics/series", operation_id="metric_series", tags=["metrics"], responses=errors(404),
        response_model=Points,
    )  # fmt: skip
    def metric_series(
        run_id: RunId,
        name: _Names = None,
        points: Annotated[int, Query(ge=4, le=100_000)] = 2000,
        first: _Step = None,
        last: _Step = None,
    ) -> Any:
        """At most so many points of each metric between two steps, the extremes of every stretch among them."""
        return _wire(reading.metrics(run_id, name or (), points=points, first=first, last=last))

    @app.get("/runs/{run_id}/log", operation_id="log", tags=["runs"], responses=errors(404))
    def log(
        run_id: RunId,
        offset: Annotated[int, Query(ge=-(2**62), lt=2**62)] = 0,
        limit: Annotated[int, Query(ge=1, le=1 << 22)] = 1 << 20,
        attempt: Annotated[int | None, Query(ge=1, lt=2**31)] = None,
    ) -> LogDocument:
        """Whole lines of the output from a byte on; a negative offset counts from the end."""
        over = reading.run(run_id).phase.has_ended
        piece = reading.log(run_id, offset, limit, attempt)
        return LogDocument(text=piece.text, offset=piece.offset, size=piece.size, ended=over)

    @app.get("/runs/{run_id}/system", operation_id="system", tags=["metrics"], responses=errors(404))
    def system(
        run_id: RunId,
        last: Annotated[int | None, Query(ge=1, le=100_000)] = None,
        attempt: Annotated[int | None, Query(ge=1, lt=2**31)] = None,
    ) -> list[SampleDocument]:
        """Processor, memory and GPUs that the run took, every few seconds."""
        paths = reading.attempt(run_id, attempt)
        samples = [] if paths is None else read_samples(paths, last)
        return [SampleDocument.model_validate(asdict(sample)) for sample in samples]

    @app.post("/runs/{run_id}/export-tensorboard", operation_id="export", tags=["metrics"], responses=errors(404))
    def export(run_id: RunId, asked: Into) -> Export:
        """Write event files for TensorBoard, whoever trained the run."""
        from palaestra.runs.ingest.export import export_tensorboard

        report = export_tensorboard(reading.paths(run_id), asked.into)
        return Export(directory=str(report.directory), points=report.points)


def _wire(found: Mapping[str, Sequence[MetricPoint]]) -> dict[str, list[tuple[int, float | str, float]]]:
    return {name: [(step, json_number(value), time) for step, value, time in points] for name, points in found.items()}
