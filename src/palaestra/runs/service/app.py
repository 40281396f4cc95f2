"""The application: every route put together, and the one place where errors become answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Route

from palaestra import __version__
from palaestra.config import parse_section
from palaestra.errors import ConfigError, ConsentRequired, IllegalTransition, PalaestraError, UnknownRun
from palaestra.http.strict_route import StrictJsonRoute
from palaestra.redaction import Redactor
from palaestra.runs.reader import RunReader
from palaestra.runs.service.answers import ALWAYS, errors
from palaestra.runs.service.checkpoint_routes import add_checkpoint_routes
from palaestra.runs.service.metric_routes import add_metric_routes
from palaestra.runs.service.run_routes import add_run_routes
from palaestra.runs.service.stream_routes import add_stream_routes
from palaestra.runs.service.tool_routes import add_tool_routes
from palaestra.runs.spec import RunSpec
from palaestra.runs.store.registry import Registry
from palaestra.runs.supervisor.supervisor import Supervisor
from palaestra.runs.tools.tensorboard import TensorBoards
from palaestra.runs.wire import error_to_json

__all__ = ["build_api"]


def build_api(
    supervisor: Supervisor,
    reading: RunReader,
    registry: Registry,
    tensorboards: TensorBoards,
    closing: asyncio.Event,
) -> FastAPI:
    """Everything but authentication. Streams end when `closing` is set."""
    app = FastAPI(
        title="Palaestra run service", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False,
        description="Launches, watches, stops, recovers and compares training runs. Send `Authorization: Bearer` and "
        "the token that the service keeps in `var/training/service/token`.",
        responses=errors(*ALWAYS), separate_input_output_schemas=False,
    )  # fmt: skip
    app.router.route_class = StrictJsonRoute
    add_run_routes(app, supervisor, reading)
    add_metric_routes(app, reading)
    add_stream_routes(app, supervisor, reading, closing)
    add_checkpoint_routes(app, reading, registry)
    add_tool_routes(app, supervisor, reading, tensorboards)
    _add_error_answers(app)
    return app


@dataclass(frozen=True)
class _Refusal:
    status: int
    error: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)

    def answer(self) -> JSONResponse:
        return JSONResponse({"error": self.error}, self.status, self.headers)


def _add_error_answers(app: FastAPI) -> None:
    @app.exception_handler(PalaestraError)
    async def ours(request: Request, error: PalaestraError) -> JSONResponse:
        return _Refusal(_status(error), error_to_json(error)).answer()

    @app.exception_handler(Exception)
    async def mistake(request: Request, error: Exception) -> JSONResponse:
        what = f"{request.method} {request.url.path[:200]}"
        text = Redactor()(f"{what}: a mistake of the service ({type(error).__name__}: {error}).")[:500]
        remedy = "service.log of its state directory has more."
        facts = {"code": "failed", "text": f"{text} {remedy}", "place": "", "reason": text, "remedy": remedy}
        return _Refusal(500, facts).answer()

    @app.exception_handler(RequestValidationError)
    async def bad_input(request: Request, error: RequestValidationError) -> JSONResponse:
        return _Refusal(422, error_to_json(_bad_input(error))).answer()

    @app.exception_handler(HTTPException)
    async def not_a_route(request: Request, error: HTTPException) -> JSONResponse:
        status = 422 if error.status_code == 400 else error.status_code
        code = {404: "no_route", 405: "bad_method", 422: "bad_request"}.get(status, "refused")
        text = f"{request.method} {request.url.path[:200]}: {error.detail}."
        headers = dict(error.headers or {})
        if status == 405:
            routes = (route for route in app.routes if isinstance(route, Route))
            fitting = (route for route in routes if route.path_regex.match(request.url.path))
            headers["Allow"] = ", ".join(sorted({method for route in fitting for method in route.methods or ()}))
        facts = {"code": code, "text": text, "place": "", "reason": text, "remedy": ""}
        return _Refusal(status, facts, headers).answer()


def _status(error: PalaestraError) -> int:
    if isinstance(error, UnknownRun):
        return 404
    if isinstance(error, IllegalTransition | ConsentRequired):
        return 409
    return 422 if isinstance(error, ConfigError) else 500


def _bad_input(error: RequestValidationError) -> ConfigError:
    body = error.body
    if isinstance(body, dict) and isinstance(body.get("spec"), dict):
        try:
            # Our own words for it name the nearest key.
            parse_section(RunSpec, body["spec"], place="spec")
        except ConfigError as refusal:
            return refusal
    found = error.errors()[0]
    if found["type"] == "json_invalid":
        why = found.get("ctx", {}).get("error", "")
        # A key given twice or a NaN is refused without a position.
        reason = f"is not JSON from this character on ({why})" if found["loc"][-1] else f"is not strict JSON ({why})"
        return ConfigError("body", found["loc"][-1], reason, "Send one JSON document")
    if isinstance(found.get("input"), bytes):
        # Insisted upon: a web page can make a browser send forms to this machine, but not JSON.
        return ConfigError("Content-Type", "", "the body must be declared as JSON", "Send application/json")
    place = ".".join(str(part) for part in found["loc"][1:]) or "body"
    return ConfigError(place, found.get("input"), found["msg"].removeprefix("Value error, ").rstrip("."))
