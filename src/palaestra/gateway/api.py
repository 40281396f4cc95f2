"""The gateway's own routes: open, list, renew and close sessions, health and metrics, and their OpenAPI description."""

# Annotations are evaluated here: FastAPI reads the bounds of the configuration out of them.
import time
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field, create_model
from starlette.exceptions import HTTPException
from starlette.routing import Route

from palaestra import __version__
from palaestra.errors import SessionFailed, SessionRefused
from palaestra.gateway.auth import CALLER
from palaestra.gateway.config import GatewayConfig
from palaestra.gateway.desk import SessionDesk
from palaestra.gateway.error_responses import ErrorResponse, error_response
from palaestra.gateway.leases import Lease, State
from palaestra.gateway.metrics import CONTENT_TYPE
from palaestra.http.strict_route import StrictJsonRoute
from palaestra.sessions.wire import SESSION_TOKEN_HEADER

__all__ = ["build_api"]

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
SessionId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]+$", min_length=1, max_length=64)]


class ErrorFacts(BaseModel):
    """What went wrong."""

    code: str
    message: str
    reason: str | None = None


class Error(BaseModel):
    """Every answer that is not a success."""

    error: ErrorFacts


class SessionLease(BaseModel):
    """A session that belongs to its client until the lease expires."""

    session_id: str
    session_type: str
    expires_at: float
    """Unix time at which the lease runs out, unless a request renews it."""
    ttl_s: float


class Opened(SessionLease):
    """The answer to opening a session: its lease, and the token, which is sent only once."""

    session_token: str
    """Sent as X-Palaestra-Session-Token with every request about the session."""


class Listed(BaseModel):
    """One session as the operator sees it."""

    session_id: str
    session_type: str
    state: State
    age_s: float
    ttl_s: float
    lease_left_s: float
    reason: str | None
    """Why it was lost."""


class Listing(BaseModel):
    """Every session there is."""

    sessions: list[Listed]


class Closed(BaseModel):
    """A session that is no more."""

    session_id: str
    state: Literal["closed"] = "closed"


class Health(BaseModel):
    """Whether sessions can be opened."""

    status: Literal["ok", "starting", "draining"]


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Error, "description": _MEANING[status]} for status in statuses}


_SESSION_TOKEN = {
    "name": SESSION_TOKEN_HEADER, "in": "header", "required": False, "schema": {"type": "string"},
    "description": "The session_token from POST /sessions. Not needed with the operator's token or without tokens.",
}  # fmt: skip
_MEANING = {
    400: "malformed", 401: "no token, or a wrong one",
    403: "another client's session (`not_your_session`), or from a web page of another origin",
    404: "no such session", 405: "not with this method", 408: "its body did not come",
    409: "not in this state", 413: "too large", 422: "bad input; nothing changed", 429: "every place is taken",
    502: "the session broke (`environment_failed`)", 503: "stopping or not ready", 504: "the session hangs",
}  # fmt: skip


def build_api(desk: SessionDesk, config: GatewayConfig) -> FastAPI:
    """The application behind every path but /proxy."""
    app = FastAPI(
        title="Palaestra gateway", version=__version__, docs_url=None, redoc_url=None,
        description="Opens, leases, proxies and reaps UI sessions.", responses=_errors(400, 401, 403, 413),
        redirect_slashes=False,
    )  # fmt: skip
    app.router.route_class = StrictJsonRoute
    _add_session_routes(app, desk, config)
    _add_observation_routes(app, desk)
    _add_error_replies(app)
    _describe_proxy(app)
    return app


def _add_session_routes(app: FastAPI, desk: SessionDesk, config: GatewayConfig) -> None:
    ttl = Field(config.ttl_s, ge=config.min_ttl_s, le=config.max_ttl_s, description="Seconds it lives unused.")
    # Not the configuration's: in a cluster the manifests say what there is.
    known = desk.session_types
    kinds = Field(known[0], min_length=1, json_schema_extra={"enum": list(known)})
    opening: Any = create_model("Opening", __config__=_STRICT, session_type=(str, kinds), ttl_s=(float, ttl))
    renewal: Any = create_model("Renewal", __config__=_STRICT, ttl_s=(float, ttl))

    @app.post("/sessions", status_code=201, responses=_errors(422, 429, 502, 503, 504), operation_id="open_session")
    async def open_session(asked: opening) -> Opened:
        lease = await desk.open(asked.session_type, asked.ttl_s)
        return Opened(**_lease_fields(lease, desk), session_token=lease.token)

    @app.get("/sessions", operation_id="list_sessions")
    async def list_sessions() -> Listing:
        return Listing.model_validate({"sessions": desk.listing()})

    owned: dict[str, Any] = {"parameters": [_SESSION_TOKEN]}
    renew_errors, close_errors = _errors(404, 409, 422, 502), _errors(404, 409, 422)

    @app.post("/sessions/{session_id}/renew", responses=renew_errors, operation_id="renew_session", openapi_extra=owned)
    async def renew_session(session_id: SessionId, asked: renewal, request: Request) -> SessionLease:
        desk.check_owner(session_id, request.scope[CALLER])
        return SessionLease(**_lease_fields(desk.renew(session_id, asked.ttl_s), desk))

    @app.delete("/sessions/{session_id}", responses=close_errors, operation_id="close_session", openapi_extra=owned)
    async def close_session(session_id: SessionId, request: Request) -> Closed:
        desk.check_owner(session_id, request.scope[CALLER])
        await desk.close(session_id)
        return Closed(session_id=session_id)


def _add_observation_routes(app: FastAPI, desk: SessionDesk) -> None:
    @app.get("/health", responses={503: {"model": Health}}, operation_id="health")
    async def health() -> JSONResponse:
        ready = desk.runtime.facts()["ready"] > 0
        status = "draining" if desk.draining else "ok" if ready else "starting"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

    @app.get("/metrics", response_class=PlainTextResponse, responses=text, operation_id="metrics")
    async def metrics() -> PlainTextResponse:
        written = desk.metrics.text(desk.table.counts(), limit=desk.table.limit, servers=desk.runtime.facts())
        return PlainTextResponse(written, media_type=CONTENT_TYPE)


def _lease_fields(lease: Lease, desk: SessionDesk) -> dict[str, Any]:
    return {
        "session_id": lease.session_id, "session_type": lease.session_type, "ttl_s": lease.ttl_s,
        "expires_at": round(time.time() + lease.left_s(desk.clock()), 3),
    }  # fmt: skip


def _add_error_replies(app: FastAPI) -> None:
    def respond(reply: ErrorResponse) -> JSONResponse:
        return JSONResponse(reply.document, reply.status, reply.headers)

    @app.exception_handler(SessionRefused)
    @app.exception_handler(SessionFailed)
    async def ours(request: Request, error: Any) -> JSONResponse:
        return respond(error_response(error))

    @app.exception_handler(RequestValidationError)
    async def bad_input(request: Request, error: RequestValidationError) -> JSONResponse:
        found = error.errors()[0]
        kind = request.headers.get("content-type", "")
        if isinstance(found.get("input"), bytes):
            # Insisted upon: a web page can make a browser send forms to this machine, but not JSON.
            text = f"Content-Type = {kind!r:.100}: the body must be declared as JSON. Send application/json."
            return respond(ErrorResponse(422, "bad_request", text))
        if found["type"] == "json_invalid":
            at, why = found["loc"][-1], found.get("ctx", {}).get("error", "")
            return respond(ErrorResponse(422, "bad_request", f"the body is not JSON ({why} at character {at})."))
        place = ".".join(str(part) for part in found["loc"])
        return respond(ErrorResponse(422, "bad_request", f"{place} = {found.get('input')!r:.200}: {found['msg']}."))

    @app.exception_handler(HTTPException)
    async def not_a_route(request: Request, error: HTTPException) -> JSONResponse:
        # A body that is no text at all is bad input like any other.
        status = 422 if error.status_code == 400 else error.status_code
        code = {404: "no_route", 405: "bad_method", 422: "bad_request"}.get(status, "refused")
        reply = ErrorResponse(status, code, f"{request.method} {request.url.path[:200]}: {error.detail}.")
        reply.headers.update(error.headers or {})
        if status == 405:
            # Several routes share a path; each knows its own methods only.
            routes = (route for route in app.routes if isinstance(route, Route))
            found = {
                method for route in routes if route.path_regex.match(request.url.path) for method in route.methods or ()
            }
            reply.headers["Allow"] = ", ".join(sorted(found))
        return respond(reply)


def _describe_proxy(app: FastAPI) -> None:
    """The proxy is answered before FastAPI sees it; its description is written here."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = generate()
            answers = {str(status): _described(status) for status in (400, 401, 403, 404, 405, 408, 409, 413, 502, 504)}
            answers["default"] = {"description": "what the session answered"}
            parameters = [
                _SESSION_TOKEN,
                {"name": "session_id", "in": "path", "required": True,
                 "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}},
                {"name": "path", "in": "path", "required": True,
                 "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*$", "maxLength": 1000}},
            ]  # fmt: skip
            schema["paths"]["/proxy/{session_id}/{path}"] = {
                method: {"operationId": f"proxy_{method}", "summary": "Ask something of a session; renews its lease.",
                         "parameters": parameters, "responses": answers}
                for method in ("get", "post", "put", "patch", "delete")
            }  # fmt: skip
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _described(status: int) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": _MEANING[status], "content": {"application/json": {"schema": schema}}}
