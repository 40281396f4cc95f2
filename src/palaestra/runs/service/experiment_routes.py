"""Routes of sweeps, and of comparisons of runs."""

# No `from __future__ import annotations`: FastAPI evaluates the annotations.
import math
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from fastapi import FastAPI, Path, Query
from pydantic import Field, StrictBool

from palaestra.runs.analysis.groups import GroupComparison, compare_groups
from palaestra.runs.comparison import Comparison, compare
from palaestra.runs.differences.run_diff import RunDifference, diff_runs
from palaestra.runs.plots.curves import build_curves
from palaestra.runs.reader import RunReader
from palaestra.runs.service.schemas import (
    CONFLICT,
    NOT_FOUND,
    NOT_FOUND_OR_CONFLICT,
    RUN_ID,
    RequestBody,
    ResponseBody,
    RunIdText,
    new_router,
)
from palaestra.runs.sweeps.controller import SweepController
from palaestra.runs.sweeps.report import SweepDetails, SweepRecord
from palaestra.runs.sweeps.selection import choose_metric, select_compared
from palaestra.runs.sweeps.spec import SweepSpec
from palaestra.runs.wire import JsonObject, to_json

SweepId: TypeAlias = Annotated[
    str, Path(pattern=RUN_ID, min_length=1, max_length=60, description="A sweep id, or a unique prefix of one.")
]


class StartSweepBody(RequestBody):
    """A sweep to start."""

    spec: SweepSpec
    consent: Annotated[str | None, Field(max_length=64)] = None
    """The digest of the command of its first run, for runners that execute foreign code."""


class StopSweepBody(RequestBody):
    """How to stop a sweep."""

    keep_running: StrictBool = False
    """Let running runs continue; only queued ones are stopped."""
    grace_s: Annotated[float | None, Field(ge=0, le=3600)] = None
    """Seconds between the request to stop and a kill of each run; null uses the runner's default."""


class ResumeSweepBody(RequestBody):
    """How to resume a sweep."""

    retry_failed: StrictBool = False
    """Also continue the trials that failed."""


class CurveResponse(ResponseBody):
    """The learning curve of one group. Lists have one value for each step; null where there is none."""

    label: str
    """`A`, `B`, … as in the comparison."""
    mean: list[float | None]
    """Mean over the runs; it ends where the shortest run of the group ends."""
    low: list[float | None]
    """Lower end of the 95 % interval of the mean (Student's t); null for fewer than three runs."""
    high: list[float | None]


class CurvesResponse(ResponseBody):
    """Learning curves of groups of runs on a common grid of steps."""

    metric: str
    steps: list[int]
    curves: list[CurveResponse]


_ComparedRuns: TypeAlias = Annotated[list[RunIdText] | None, Query(max_length=100)]
_Where: TypeAlias = Annotated[str, Query(max_length=2000)]
_ComparedSweep: TypeAlias = Annotated[str, Query(pattern=f"^$|{RUN_ID}", max_length=60)]
_Metric: TypeAlias = Annotated[str | None, Query(min_length=1, max_length=200)]
_Direction: TypeAlias = Literal["maximize", "minimize"] | None


def add_sweep_routes(app: FastAPI, sweeps: SweepController) -> None:
    """Add the routes to the application."""
    router = new_router("sweeps")

    @router.get("/sweeps", response_model=list[SweepRecord])
    def list_sweeps() -> list[JsonObject]:
        """All sweeps, newest first."""
        return [to_json(record) for record in sweeps.reader.sweeps()]

    @router.post("/sweeps", status_code=201, responses=CONFLICT, response_model=SweepRecord)
    async def start_sweep(body: StartSweepBody) -> JsonObject:
        """Create a sweep. Its runs are submitted to the queue as earlier ones end."""
        return to_json(await sweeps.create(body.spec, body.consent))

    @router.get("/sweeps/{sweep_id}", responses=NOT_FOUND, response_model=SweepDetails)
    def show_sweep(sweep_id: SweepId) -> JsonObject:
        """A sweep with all its trials, best first."""
        return to_json(sweeps.reader.sweep(sweep_id))

    @router.post("/sweeps/{sweep_id}/stop", responses=NOT_FOUND_OR_CONFLICT, response_model=SweepRecord)
    async def stop_sweep(sweep_id: SweepId, body: StopSweepBody) -> JsonObject:
        """Submit no further runs, and stop those that were submitted. Returns when their processes have ended."""
        return to_json(await sweeps.stop(sweep_id, keep_running=body.keep_running, grace_s=body.grace_s))

    @router.post("/sweeps/{sweep_id}/resume", responses=NOT_FOUND_OR_CONFLICT, response_model=SweepRecord)
    async def resume_sweep(sweep_id: SweepId, body: ResumeSweepBody) -> JsonObject:
        """Continue a stopped sweep. Stopped runs resume from their checkpoints, or are started anew without one."""
        return to_json(await sweeps.resume(sweep_id, retry_failed=body.retry_failed))

    app.include_router(router)


def add_comparison_routes(app: FastAPI, reader: RunReader) -> None:
    """Add the routes of comparisons to the application."""
    router = new_router("runs")

    @router.get("/compare", operation_id="compare", responses=NOT_FOUND, response_model=Comparison)
    def compare_runs(run: Annotated[list[RunIdText], Query(min_length=2, max_length=50)]) -> JsonObject:
        """Runs side by side."""
        return to_json(compare(reader, run))

    @router.get("/diff", operation_id="diff_runs", responses=NOT_FOUND, response_model=RunDifference)
    def diff(run: Annotated[list[RunIdText], Query(min_length=2, max_length=2)]) -> JsonObject:
        """How the second of two runs differs from the first: configuration, code, packages, machine and variables."""
        return to_json(diff_runs(reader, *run))

    @router.get("/compare/groups", responses=NOT_FOUND, response_model=GroupComparison)
    def compare_run_groups(
        run: _ComparedRuns = None,
        where: _Where = "",
        sweep: _ComparedSweep = "",
        metric: _Metric = None,
        direction: _Direction = None,
        step: Annotated[int | None, Query(ge=0, lt=2**63)] = None,
        pool_envs: bool = False,
    ) -> JsonObject:
        """Runs that differ only in their seed as groups, compared at equal steps, best first.

        The runs are named, those of a sweep, or those that match a query. The default step is the largest that all
        runs have reached which did not fail and were not stopped. The default metric and direction are those of the
        sweep, otherwise the return, to be maximized.
        """
        records = select_compared(reader, run or (), where=where, sweep=sweep)
        metric, direction = choose_metric(reader, sweep, metric, direction)
        return to_json(
            compare_groups(reader, records, metric=metric, direction=direction, step=step, pool_envs=pool_envs)
        )

    @router.get("/compare/curves", responses=NOT_FOUND)
    def compare_curves(
        run: _ComparedRuns = None,
        where: _Where = "",
        sweep: _ComparedSweep = "",
        metric: _Metric = None,
        direction: _Direction = None,
    ) -> CurvesResponse:
        """The learning curves of the groups of `/compare/groups`, in the same order."""
        records = select_compared(reader, run or (), where=where, sweep=sweep)
        metric, direction = choose_metric(reader, sweep, metric, direction)
        curves = build_curves(reader, compare_groups(reader, records, metric=metric, direction=direction))
        return CurvesResponse(
            metric=curves.metric,
            steps=list(curves.steps),
            curves=[
                CurveResponse(
                    label=curve.label,
                    mean=_replace_nan(curve.mean),
                    low=_replace_nan(curve.low),
                    high=_replace_nan(curve.high),
                )
                for curve in curves.curves
            ],
        )

    app.include_router(router)


def _replace_nan(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]
