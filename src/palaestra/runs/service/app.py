"""The FastAPI application: all routes, and the conversion of errors to responses."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from palaestra import __version__
from palaestra.config import Section, parse_section
from palaestra.errors import ConfigError, ConsentRequired, IllegalTransition, PalaestraError, UnknownRun
from palaestra.redaction import Redactor
from palaestra.runs.archive.schedule import RetentionSchedule
from palaestra.runs.notifications.webhooks import Webhooks
from palaestra.runs.play.plays import Plays
from palaestra.runs.play.spec import PlaySpec
from palaestra.runs.reader import RunReader
from palaestra.runs.service.artifact_routes import add_artifact_routes
from palaestra.runs.service.checkpoint_routes import add_checkpoint_routes
from palaestra.runs.service.experiment_routes import add_comparison_routes, add_sweep_routes
from palaestra.runs.service.metric_routes import add_metric_routes, add_video_routes
from palaestra.runs.service.play_routes import add_play_routes
from palaestra.runs.service.run_routes import add_run_routes
from palaestra.runs.service.schemas import COMMON_ERRORS, describe_errors
from palaestra.runs.service.streaming import add_stream_routes
from palaestra.runs.service.tool_routes import add_tool_routes, add_webhook_routes
from palaestra.runs.service.trajectory_routes import add_trajectory_routes
from palaestra.runs.service.web.access import WebAccess
from palaestra.runs.service.web.routes import add_web_routes
from palaestra.runs.spec import RunSpec
from palaestra.runs.store.registry import Registry
from palaestra.runs.supervisor.supervisor import Supervisor
from palaestra.runs.sweeps.controller import SweepController
from palaestra.runs.sweeps.spec import SweepSpec
from palaestra.runs.tools.tensorboard import TensorBoards
from palaestra.runs.wire import JsonObject, error_to_json

_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
_SPECS: dict[str, type[Section]] = {"/play": PlaySpec, "/sweeps": SweepSpec}
"""Section of `spec` in a body, by route; a `RunSpec` in the others."""


def build_api(
    supervisor: Supervisor,
    reader: RunReader,
    registry: Registry,
    tensorboards: TensorBoards,
    plays: Plays,
    sweeps: SweepController,
    closing: asyncio.Event,
    access: WebAccess,
    retention: RetentionSchedule,
    webhooks: Webhooks,
) -> FastAPI:
    """The application without authentication. Streams end when `closing` is set."""
    app = FastAPI(
        title="Palaestra run service",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        description="Launches, watches, stops, recovers and compares training runs. Send `Authorization: Bearer` and "
        "the token that the service keeps in `var/training/service/token`.",
        responses=describe_errors(*COMMON_ERRORS),
        generate_unique_id_function=lambda route: route.name,
    )
    add_run_routes(app, supervisor, reader, retention)
    add_sweep_routes(app, sweeps)
    add_comparison_routes(app, reader)
    add_metric_routes(app, reader)
    add_stream_routes(app, supervisor, reader, closing)
    add_checkpoint_routes(app, reader, registry)
    add_tool_routes(app, supervisor, reader, tensorboards, closing)
    add_webhook_routes(app, webhooks)
    add_video_routes(app, reader)
    add_artifact_routes(app, reader)
    add_trajectory_routes(app, reader)
    add_play_routes(app, plays, reader.home)
    add_web_routes(app, reader, access)
    _add_error_handlers(app)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(PalaestraError)
    async def handle_known_error(request: Request, error: PalaestraError) -> JSONResponse:
        return _error_response(_status(error), error_to_json(error))

    @app.exception_handler(Exception)
    async def handle_unexpected_error(request: Request, error: Exception) -> JSONResponse:
        where = f"{request.method} {request.url.path[:200]}"
        reason = Redactor()(f"{where}: an internal error of the service ({type(error).__name__}: {error}).")[:500]
        remedy = "service.log in its state directory holds the traceback."
        detail = {"code": "failed", "text": f"{reason} {remedy}", "place": "", "reason": reason, "remedy": remedy}
        return _error_response(500, detail)

    @app.exception_handler(RequestValidationError)
    async def handle_bad_input(request: Request, error: RequestValidationError) -> JSONResponse:
        return _error_response(422, error_to_json(_input_error(error, request)))

    @app.exception_handler(HTTPException)
    async def handle_http_error(request: Request, error: HTTPException) -> JSONResponse:
        status = 422 if error.status_code == 400 else error.status_code
        code = {404: "no_route", 405: "bad_method", 422: "bad_request"}.get(status, "refused")
        text = f"{request.method} {request.url.path[:200]}: {error.detail}."
        headers = dict(error.headers or {})
        if status == 405:
            allowed = (method for method in _METHODS if _has_route(app, {**request.scope, "method": method}))
            headers["Allow"] = ", ".join(allowed)
        detail = {"code": code, "text": text, "place": "", "reason": text, "remedy": ""}
        return _error_response(status, detail, headers)


def _has_route(app: FastAPI, scope: Scope) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)


def _error_response(status: int, detail: JsonObject, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": detail}, status, headers)


def _status(error: PalaestraError) -> int:
    if isinstance(error, UnknownRun):
        return 404
    if isinstance(error, IllegalTransition | ConsentRequired):
        return 409
    return 422 if isinstance(error, ConfigError) else 500


def _input_error(error: RequestValidationError, request: Request) -> ConfigError:
    body = error.body
    section = _SPECS.get(getattr(request.scope.get("route"), "path", ""), RunSpec)
    if isinstance(body, dict) and isinstance(body.get("spec"), dict):
        try:
            # Its error names the closest key.
            parse_section(section, body["spec"], place="spec")
        except ConfigError as spec_error:
            return spec_error
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        why = first.get("ctx", {}).get("error", "")
        # A duplicate key or a NaN is refused without a position.
        reason = f"is not JSON from this character on ({why})" if first["loc"][-1] else f"is not strict JSON ({why})"
        return ConfigError("body", first["loc"][-1], reason, "Send one JSON document")
    if isinstance(first.get("input"), bytes):
        # Required: a web page can make a browser send forms to this machine, but not JSON.
        return ConfigError("Content-Type", "", "the body must be declared as JSON", "Send application/json")
    place = ".".join(str(part) for part in first["loc"][1:]) or "body"
    return ConfigError(place, first.get("input"), first["msg"].removeprefix("Value error, ").rstrip("."))
