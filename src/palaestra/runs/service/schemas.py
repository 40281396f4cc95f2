"""Request bodies, parameters and error responses of the routes, and the responses that are no dataclass elsewhere.

Runs, checkpoints, events and findings are described by their own dataclasses (`runs.record`, `runs.runner`, …): a route
names the dataclass as its response model and returns `wire.to_json` of it.
"""

# No `from __future__ import annotations`: FastAPI and pydantic evaluate the annotations.
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import Path, Query
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StringConstraints

from palaestra.runs.record import CheckpointRecord
from palaestra.runs.spec import RunSpec, find_text_fault
from palaestra.runs.video.clip import Clip
from palaestra.runs.wire import JsonObject, Number

__all__ = [
    "COMMON_ERRORS",
    "AttemptNumber",
    "ClipResponse",
    "DeployBody",
    "DrainBody",
    "DrainResponse",
    "ExportBody",
    "ExportResponse",
    "FilterText",
    "GcBody",
    "ImportBody",
    "LogOffset",
    "LogResponse",
    "MetricResponse",
    "MetricSeries",
    "PreflightBody",
    "ResumeBody",
    "RunId",
    "RunIdText",
    "ServiceErrorDetail",
    "ServiceErrorResponse",
    "ServiceHealth",
    "StartBody",
    "StopBody",
    "TensorBoardBody",
    "TensorBoardResponse",
    "VerifyResponse",
    "VideoBody",
    "WithdrawBody",
    "describe_errors",
    "describe_stream",
]

_RUN_ID = r"^[a-z0-9][a-z0-9._-]*$"
RunId: TypeAlias = Annotated[
    str, Path(pattern=_RUN_ID, min_length=1, max_length=90, description="A run id, or a unique prefix of one.")
]
RunIdText: TypeAlias = Annotated[str, StringConstraints(pattern=_RUN_ID, max_length=90)]
"""A run id in a query or a body."""
FilterText: TypeAlias = Annotated[str | None, Query(max_length=200)]
AttemptNumber: TypeAlias = Annotated[int | None, Query(ge=1, lt=2**31)]
LogOffset: TypeAlias = Annotated[int, Query(ge=-(2**62), lt=2**62)]

MetricSeries: TypeAlias = dict[str, list[Annotated[list[Number], Field(min_length=3, max_length=3)]]]
"""Points by metric name; each point is a step, a value and a unix time."""

COMMON_ERRORS = (401, 403, 413, 422, 500)
"""Statuses that every route may return."""
_ERROR_DESCRIPTIONS = {
    401: "the token is missing or wrong",
    403: "the request comes from a web page, or its `Host` is not allowed",
    404: "no such run",
    409: "not possible in this phase (`illegal_transition`), or the command needs consent (`consent_needed`)",
    413: "the body is too large",
    416: "the requested range is outside the file",
    422: "bad input, or refused by the preflight (`refused`); nothing changed",
    500: "an internal error of the service; its log holds the traceback",
}


class _Response(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True, json_schema_serialization_defaults_required=True)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class ServiceErrorDetail(BaseModel):
    """An error."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    code: str
    """Kind of the error: `refused`, `unknown_run`, `bad_request`, `consent_needed`, `illegal_transition`, …"""
    text: str
    """One sentence for people."""
    place: str = ""
    """The part of the request that is wrong."""
    reason: str = ""
    remedy: str = ""
    """How to fix it."""
    value: Any = None
    digest: str | None = None
    """With `consent_needed`: the `consent` that agrees to the command."""


class ServiceErrorResponse(_Response):
    """Every response that is not a success."""

    error: ServiceErrorDetail


class ServiceHealth(_Response):
    """State and version of the service."""

    status: Literal["ok", "draining"]
    version: str
    pid: int


class LogResponse(_Response):
    """Whole lines of a run's output."""

    text: str
    offset: int
    """Offset of the next line, to continue from."""
    size: int
    ended: bool
    """Whether the run has ended, so that no more output will follow."""


class MetricResponse(_Response):
    """One metric of a run."""

    points: int
    source: str
    """Source of the numbers: `journal`, `tensorboard:losses/value_loss`, `stdout:events`."""


class VerifyResponse(_Response):
    """Whether the bytes of a checkpoint are those that were saved."""

    checkpoint: CheckpointRecord
    fits: bool
    problem: str


@dataclass(frozen=True, kw_only=True)
class ClipResponse(Clip):
    """One video file of a run."""

    name: str
    """Name in the route that returns the file."""


class TensorBoardResponse(_Response):
    """A running TensorBoard."""

    url: str
    run_ids: list[str]
    """The runs that it shows."""


class DrainResponse(_Response):
    """Whether the service starts new runs."""

    draining: bool


class ExportResponse(_Response):
    """Event files that were written."""

    directory: str
    points: int


class PreflightBody(_Body):
    """A run to check."""

    spec: RunSpec


class StartBody(_Body):
    """A run to start."""

    spec: RunSpec
    consent: Annotated[str | None, Field(max_length=64)] = None
    """The digest of the command, for runners that execute foreign code."""
    run_id: Annotated[str | None, Field(pattern=_RUN_ID, max_length=90)] = None
    """The run id of the preview; null assigns a new one."""


class StopBody(_Body):
    """How to stop a run."""

    grace_s: Annotated[float | None, Field(ge=0, le=3600)] = None
    """Seconds between the request to stop and a kill; null uses the runner's default."""


def _check_text(text: str) -> str:
    fault = find_text_fault(text)
    if fault:
        raise ValueError(fault)
    return text


_Text = Annotated[str, AfterValidator(_check_text)]


class ResumeBody(_Body):
    """How to resume a run."""

    consent: Annotated[str | None, Field(max_length=64)] = None
    """The digest of the command, for runners that execute foreign code."""
    checkpoint: Annotated[_Text | None, Field(min_length=1, max_length=4096)] = None
    """Id of the checkpoint, a prefix of the id, its file name or its path; null: the newest undamaged one."""
    changes: Annotated[dict[str, Any], Field(max_length=100)] = {}
    """Values by dotted key of the runner's configuration, such as `trainer.total_timesteps`."""


class DrainBody(_Body):
    """Whether to stop starting new runs."""

    on: StrictBool


class GcBody(_Body):
    """How to apply the retention policy."""

    dry_run: StrictBool = True
    """Report what would be removed without removing it."""


class ExportBody(_Body):
    """Where to write event files."""

    into: Annotated[str | None, Field(min_length=1, max_length=4096)] = None
    """A directory on the service's machine; null uses the run's own."""


class ImportBody(_Body):
    """A checkpoint to import."""

    path: Annotated[_Text, Field(min_length=1, max_length=4096)]
    """Path on the service's machine."""
    agent_id: Annotated[_Text, Field(max_length=200)] = ""
    env_id: Annotated[_Text, Field(max_length=200)] = ""
    env_step: Annotated[int | None, Field(ge=0, lt=2**63)] = None


class DeployBody(_Body):
    """Where to deploy a checkpoint."""

    env_id: Annotated[_Text | None, Field(max_length=200)] = None
    """Null uses the environment that it was trained in."""


class WithdrawBody(_Body):
    """Which deployment to withdraw."""

    env_id: Annotated[_Text, Field(min_length=1, max_length=200)]


class VideoBody(_Body):
    """How to record a clip."""

    checkpoint_id: Annotated[str | None, Field(pattern=r"^[0-9a-f]+$", max_length=64)] = None
    """Null uses the newest checkpoint of the run."""
    frames: Annotated[int, Field(ge=1, le=200)] = 200
    """Maximum number of frames."""


class TensorBoardBody(_Body):
    """Runs to show together."""

    run_ids: Annotated[list[Annotated[str, Field(max_length=90)]], Field(min_length=1, max_length=50)]


def describe_errors(*statuses: int) -> dict[int | str, JsonObject]:
    """OpenAPI descriptions of error responses."""
    return {status: {"model": ServiceErrorResponse, "description": _ERROR_DESCRIPTIONS[status]} for status in statuses}


def describe_stream(*statuses: int) -> dict[int | str, JsonObject]:
    """OpenAPI descriptions of an event stream and of its error responses, which are JSON."""
    text = {"type": "string"}
    event = {"type": "object", "properties": {"id": text, "event": text, "data": text}}
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ServiceErrorResponse.__name__}"}}}
    return {
        200: {"description": "server-sent events", "content": {"text/event-stream": {"schema": event}}},
        **{
            status: {"description": _ERROR_DESCRIPTIONS[status], "content": error}
            for status in (*COMMON_ERRORS, *statuses)
        },
    }
