"""What every route says about its failures, and how a run is named in a path."""

# Annotations are evaluated here: FastAPI reads them.
from typing import Annotated, Any

from fastapi import Path
from pydantic import StringConstraints

from palaestra.runs.service.documents import RUN_ID, Error

__all__ = ["RunId", "RunName", "errors", "streamed"]

RunId = Annotated[
    str,
    Path(pattern=RUN_ID, min_length=1, max_length=90, description="A run's id, or how it begins."),
]
RunName = Annotated[str, StringConstraints(pattern=RUN_ID, max_length=90)]
"""The same in a query or a body."""

ALWAYS = (401, 403, 413, 422, 500)
"""What any route may answer."""
_MEANING = {
    401: "no token, or a wrong one",
    403: "from a web page, or under a name that is not allowed",
    404: "no such run",
    409: "not in this phase (`illegal_transition`), or nobody agreed to the command (`consent_needed`)",
    413: "too large",
    416: "there are no such bytes",
    422: "bad input, or refused by the preflight (`refused`); nothing changed",
    500: "a mistake of the service; its log has more",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Their descriptions, for OpenAPI."""
    return {status: {"model": Error, "description": _MEANING[status]} for status in statuses}


def streamed(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The description of a stream, whose failures are JSON all the same."""
    text = {"type": "string"}
    event = {"type": "object", "properties": {"id": text, "event": text, "data": text}}
    refusal = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        200: {"description": "server-sent events", "content": {"text/event-stream": {"schema": event}}},
        **{status: {"description": _MEANING[status], "content": refusal} for status in (*ALWAYS, *statuses)},
    }
