"""Parameters, error responses and base classes that the routes share.

Runs, checkpoints, events and findings are described by their own dataclasses (`runs.record`, `runs.runner`, …): a route
names the dataclass as its response model and returns `wire.to_json` of it. Other bodies and responses are defined
beside their routes.
"""

# No `from __future__ import annotations`: FastAPI and pydantic evaluate the annotations.
from typing import Annotated, Any, TypeAlias

from fastapi import APIRouter, Path, Query
from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints

from palaestra.http.strict_route import StrictJsonRoute
from palaestra.runs.spec import find_text_fault
from palaestra.runs.wire import JsonObject

RUN_ID = r"^[a-z0-9][a-z0-9._-]*$"
RunId: TypeAlias = Annotated[
    str, Path(pattern=RUN_ID, min_length=1, max_length=90, description="A run id, or a unique prefix of one.")
]
RunIdText: TypeAlias = Annotated[str, StringConstraints(pattern=RUN_ID, max_length=90)]
"""A run id in a query or a body."""
FilterText: TypeAlias = Annotated[str | None, Query(max_length=200)]
AttemptNumber: TypeAlias = Annotated[int | None, Query(ge=1, lt=2**31)]
LogOffset: TypeAlias = Annotated[int, Query(ge=-(2**62), lt=2**62)]

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


class ResponseBody(BaseModel):
    """Base class of responses."""

    model_config = ConfigDict(use_attribute_docstrings=True, json_schema_serialization_defaults_required=True)


class RequestBody(BaseModel):
    """Base class of request bodies; refuses unknown keys."""

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


class ServiceErrorResponse(ResponseBody):
    """Every response that is not a success."""

    error: ServiceErrorDetail


def _check_text(text: str) -> str:
    fault = find_text_fault(text)
    if fault:
        raise ValueError(fault)
    return text


StoredText: TypeAlias = Annotated[str, AfterValidator(_check_text)]


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


NOT_FOUND = describe_errors(404)
CONFLICT = describe_errors(409)
NOT_FOUND_OR_CONFLICT = describe_errors(404, 409)


def new_router(tag: str) -> APIRouter:
    """A router that refuses ambiguous JSON and groups its routes under a tag of the OpenAPI document."""
    return APIRouter(tags=[tag], route_class=StrictJsonRoute)
