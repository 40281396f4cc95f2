"""The ASGI application of the run service: all routes, the conversion of errors to responses, and authentication.

`AuthMiddleware` is the outermost layer. It checks the token, the `Host` header, the origin and the body size, and
measures how long the service has been idle.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from palaestra import __version__
from palaestra.config import parse_section
from palaestra.errors import ConfigError, ConsentRequired, IllegalTransition, PalaestraError, UnknownRun
from palaestra.http.asgi import (
    AsgiApp,
    BodyTooLarge,
    Receive,
    Scope,
    Send,
    has_token,
    read_body,
    replay_body,
    send_json,
)
from palaestra.http.hosts import AllowedHosts
from palaestra.redaction import Redactor
from palaestra.runs.reader import RunReader
from palaestra.runs.service.checkpoint_routes import add_checkpoint_routes
from palaestra.runs.service.metric_routes import add_metric_routes, add_video_routes
from palaestra.runs.service.run_routes import add_run_routes
from palaestra.runs.service.schemas import COMMON_ERRORS, describe_errors
from palaestra.runs.service.streaming import add_stream_routes
from palaestra.runs.service.tool_routes import add_tool_routes
from palaestra.runs.spec import RunSpec
from palaestra.runs.store.registry import Registry
from palaestra.runs.supervisor.supervisor import Supervisor
from palaestra.runs.tools.tensorboard import TensorBoards
from palaestra.runs.wire import JsonObject, error_to_json

_log = logging.getLogger(__name__)
MAX_BODY_BYTES = 1 << 20
_TOO_LARGE = (413, "too_large", f"the body is larger than {MAX_BODY_BYTES} bytes.")
_METHODS = ("DELETE", "GET", "HEAD", "POST")


def build_api(
    supervisor: Supervisor,
    reader: RunReader,
    registry: Registry,
    tensorboards: TensorBoards,
    closing: asyncio.Event,
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
    add_run_routes(app, supervisor, reader)
    add_metric_routes(app, reader)
    add_stream_routes(app, supervisor, reader, closing)
    add_checkpoint_routes(app, reader, registry)
    add_tool_routes(app, supervisor, reader, tensorboards)
    add_video_routes(app, reader)
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
        return _error_response(422, error_to_json(_input_error(error)))

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


def _input_error(error: RequestValidationError) -> ConfigError:
    body = error.body
    if isinstance(body, dict) and isinstance(body.get("spec"), dict):
        try:
            # Its error names the closest key.
            parse_section(RunSpec, body["spec"], place="spec")
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


class AuthMiddleware:
    """Passes authorised requests on to `app` and refuses all others."""

    def __init__(self, app: AsgiApp, token: str, hosts: AllowedHosts | None = None) -> None:
        self._app, self._token = app, token.encode()
        self._hosts = hosts or AllowedHosts("127.0.0.1")
        self._in_flight = 0
        self._last_request = time.monotonic()

    def idle_s(self) -> float:
        """Seconds since the last request ended; 0 while one is in flight."""
        return 0.0 if self._in_flight else time.monotonic() - self._last_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return
        refusal = self._check(scope)
        if refusal is not None:
            await _refuse(send, *refusal)
            return
        # A health check must not keep an idle service running.
        counted = scope["path"] != "/health"
        self._in_flight += counted
        try:
            body = await read_body(receive, MAX_BODY_BYTES)
            # A client that disconnected before its request was complete gets no answer.
            if body is not None:
                await self._app(scope, replay_body(body, receive), send)
        except BodyTooLarge:
            await _refuse(send, *_TOO_LARGE)
        except Exception:  # noqa: BLE001 - a failed request is logged and does not affect others
            # The application has answered, or had begun to; then the server closes the connection.
            _log.exception("%s %s failed", scope["method"], scope["path"])
        finally:
            if counted:
                self._in_flight -= 1
                self._last_request = time.monotonic()

    def _check(self, scope: Scope) -> tuple[int, str, str] | None:
        """Status, code and text of the refusal of a request; None when it is authorised."""
        headers = dict(scope["headers"])
        if b"origin" in headers:
            # Our clients send none; browsers always add it to requests of web pages.
            return 403, "foreign_origin", "web pages are not served."
        host, server = headers.get(b"host", b"localhost").decode("latin-1"), scope.get("server")
        if not self._hosts.allows(host, server[0] if server else None):
            text = f"the service is not known as {host[:200]!r}. Start it with allowed_hosts=[NAME] to allow a name."
            return 403, "foreign_host", text
        if scope["path"] == "/health":
            return None
        if not has_token(headers.get(b"authorization", b""), self._token):
            text = (
                "the request carries no token, or a wrong one. "
                "Send Authorization: Bearer and the contents of service/token in the state directory."
            )
            return 401, "unauthorised", text
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            return _TOO_LARGE
        return None


async def _refuse(send: Send, status: int, code: str, text: str) -> None:
    error = {"code": code, "text": text, "place": "", "reason": text, "remedy": ""}
    await send_json(send, status, {"error": error}, close=True)
