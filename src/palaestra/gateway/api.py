"""The gateway's API: routes that open, list, renew and close sessions, health and metrics, and the OpenAPI document."""

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
from palaestra.gateway.error_responses import ErrorResponse, error_response
from palaestra.gateway.leases import LeaseState, SessionLease
from palaestra.gateway.metrics import CONTENT_TYPE
from palaestra.gateway.peers import Peers
from palaestra.gateway.session_service import SessionService
from palaestra.http.strict_route import StrictJsonRoute
from palaestra.sessions.wire import SESSION_TOKEN_HEADER

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_TRY_PEERS = ("no_room", "draining")
"""Codes of refusals after which a peer may open the session."""
SessionId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]+$", min_length=1, max_length=64)]


class GatewayErrorDetail(BaseModel):
    """Code and text of an error."""

    code: str
    message: str
    reason: str | None = None


class GatewayError(BaseModel):
    """The body of every error response."""

    error: GatewayErrorDetail


class LeaseResponse(BaseModel):
    """The lease of a session."""

    session_id: str
    session_type: str
    expires_at: float
    """Unix time at which the lease expires, unless a request renews it."""
    ttl_s: float


class OpenedSession(LeaseResponse):
    """The lease of a new session, and its token, which is sent only once."""

    session_token: str
    """Sent as X-Palaestra-Session-Token with every request about the session."""


class SessionSummary(BaseModel):
    """One session in a list."""

    session_id: str
    session_type: str
    gateway: str | None
    """Name of the gateway that has it; null if it has no name."""
    state: LeaseState
    age_s: float
    ttl_s: float
    lease_left_s: float
    reason: str | None
    """Why it was lost."""


class SessionList(BaseModel):
    """All sessions of this gateway and of its peers. `GET /gateways` lists peers that do not answer."""

    sessions: list[SessionSummary]


class GatewaySummary(BaseModel):
    """One gateway in a list."""

    name: str | None
    status: Literal["ok", "starting", "draining", "unreachable"]
    sessions: int | None
    """Sessions that count against the limit; null if the gateway does not answer."""
    limit: int | None


class GatewayList(BaseModel):
    """This gateway and its peers."""

    gateways: list[GatewaySummary]


class ClosedSession(BaseModel):
    """A session that was closed."""

    session_id: str
    state: Literal["closed"] = "closed"


class GatewayHealth(BaseModel):
    """Whether sessions can be opened."""

    status: Literal["ok", "starting", "draining"]


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": GatewayError, "description": _MEANING[status]} for status in statuses}


_SESSION_TOKEN = {
    "name": SESSION_TOKEN_HEADER,
    "in": "header",
    "required": False,
    "schema": {"type": "string"},
    "description": "The session_token from POST /sessions. Not needed with the operator's token or without tokens.",
}
_MEANING = {
    400: "malformed",
    401: "no token or a wrong one",
    403: "another client's session (`not_your_session`), or from a web page of another origin",
    404: "no such session",
    405: "method not allowed",
    408: "the body did not arrive in time",
    409: "not in this state",
    413: "too large",
    422: "invalid input; nothing changed",
    429: "all sessions are taken",
    502: "the session failed (`environment_failed`)",
    503: "stopping or not ready",
    504: "the session hangs",
}


def build_api(service: SessionService, config: GatewayConfig, peers: Peers) -> FastAPI:
    """The application for every path but /proxy."""
    app = FastAPI(
        title="Palaestra gateway",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        description="Opens, leases, proxies and reaps UI sessions.",
        responses=_errors(400, 401, 403, 413),
        redirect_slashes=False,
    )
    app.router.route_class = StrictJsonRoute
    _add_session_routes(app, service, config, peers)
    _add_observation_routes(app, service, config, peers)
    _add_error_handlers(app)
    _add_proxy_schema(app)
    return app


def _add_session_routes(app: FastAPI, service: SessionService, config: GatewayConfig, peers: Peers) -> None:
    ttl = Field(
        config.ttl_s,
        ge=config.min_ttl_s,
        le=config.max_ttl_s,
        description="Seconds the session lives without a request.",
    )
    # From the runtime rather than the configuration: in a cluster the manifests define the types.
    types = service.session_types
    type_field = Field(types[0], min_length=1, json_schema_extra={"enum": list(types)})
    open_body: Any = create_model("OpenRequest", __config__=_STRICT, session_type=(str, type_field), ttl_s=(float, ttl))
    renew_body: Any = create_model("RenewRequest", __config__=_STRICT, ttl_s=(float, ttl))

    @app.post("/sessions", status_code=201, responses=_errors(422, 429, 502, 503, 504), operation_id="open_session")
    async def open_session(body: open_body, request: Request) -> OpenedSession:
        try:
            lease = await service.open(body.session_type, body.ttl_s)
        except SessionRefused as refusal:
            if refusal.code not in _TRY_PEERS:
                raise
            opened = await peers.open(body.model_dump(), request.scope)
            if opened is None:
                raise
            return OpenedSession.model_validate(opened)
        return OpenedSession(**_lease_fields(lease, service), session_token=lease.token)

    @app.get("/sessions", operation_id="list_sessions")
    async def list_sessions(request: Request) -> SessionList:
        sessions = [{**one, "gateway": config.name} for one in service.list_sessions()]
        for listed in (await peers.list_all("/sessions", "sessions", request.scope)).values():
            sessions += listed or []
        return SessionList.model_validate({"sessions": sessions})

    owned: dict[str, Any] = {"parameters": [_SESSION_TOKEN]}
    renew_errors, close_errors = _errors(404, 409, 422, 502), _errors(404, 409, 422)

    @app.post("/sessions/{session_id}/renew", responses=renew_errors, operation_id="renew_session", openapi_extra=owned)
    async def renew_session(session_id: SessionId, body: renew_body, request: Request) -> LeaseResponse:
        service.check_owner(session_id, request.scope[CALLER])
        return LeaseResponse(**_lease_fields(service.renew(session_id, body.ttl_s), service))

    @app.delete("/sessions/{session_id}", responses=close_errors, operation_id="close_session", openapi_extra=owned)
    async def close_session(session_id: SessionId, request: Request) -> ClosedSession:
        service.check_owner(session_id, request.scope[CALLER])
        await service.close(session_id)
        return ClosedSession(session_id=session_id)


def _add_observation_routes(app: FastAPI, service: SessionService, config: GatewayConfig, peers: Peers) -> None:
    def describe_status() -> str:
        ready = service.runtime.counts()["ready"] > 0
        return "draining" if service.draining else "ok" if ready else "starting"

    @app.get("/health", responses={503: {"model": GatewayHealth}}, operation_id="health")
    async def health() -> JSONResponse:
        status = describe_status()
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @app.get("/gateways", operation_id="list_gateways")
    async def list_gateways(request: Request) -> GatewayList:
        sessions, limit = service.leases.num_active, service.leases.limit
        found = [{"name": config.name, "status": describe_status(), "sessions": sessions, "limit": limit}]
        for name, listed in (await peers.list_all("/gateways", "gateways", request.scope)).items():
            found += listed or [{"name": name, "status": "unreachable", "sessions": None, "limit": None}]
        return GatewayList.model_validate({"gateways": found})

    text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

    @app.get("/metrics", response_class=PlainTextResponse, responses=text, operation_id="metrics")
    async def metrics() -> PlainTextResponse:
        leases = service.leases
        rendered = service.metrics.render(
            leases.count_by_state(),
            limit=leases.limit,
            servers=service.runtime.counts(),
            peers=peers.counts(),
            gateway=config.name or "",
        )
        return PlainTextResponse(rendered, media_type=CONTENT_TYPE)


def _lease_fields(lease: SessionLease, service: SessionService) -> dict[str, Any]:
    return {
        "session_id": lease.session_id,
        "session_type": lease.session_type,
        "ttl_s": lease.ttl_s,
        "expires_at": round(time.time() + lease.remaining_s(service.clock()), 3),
    }


def _add_error_handlers(app: FastAPI) -> None:
    def respond(response: ErrorResponse) -> JSONResponse:
        return JSONResponse(response.document, response.status, response.headers)

    @app.exception_handler(SessionRefused)
    @app.exception_handler(SessionFailed)
    async def handle_session_error(request: Request, error: Any) -> JSONResponse:
        return respond(error_response(error))

    @app.exception_handler(RequestValidationError)
    async def handle_invalid_input(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        content_type = request.headers.get("content-type", "")
        if isinstance(first.get("input"), bytes):
            # Required, because a web page can make a browser send forms to this machine, but not JSON.
            text = f"Content-Type = {content_type!r:.100}: the body must be declared as JSON. Send application/json."
            return respond(ErrorResponse(422, "bad_request", text))
        if first["type"] == "json_invalid":
            at, reason = first["loc"][-1], first.get("ctx", {}).get("error", "")
            return respond(ErrorResponse(422, "bad_request", f"the body is not JSON ({reason} at character {at})."))
        place = ".".join(str(part) for part in first["loc"])
        return respond(ErrorResponse(422, "bad_request", f"{place} = {first.get('input')!r:.200}: {first['msg']}."))

    @app.exception_handler(HTTPException)
    async def handle_http_error(request: Request, error: HTTPException) -> JSONResponse:
        # FastAPI answers 400 for a body that is not text; it is invalid input like any other.
        status = 422 if error.status_code == 400 else error.status_code
        code = {404: "no_route", 405: "bad_method", 422: "bad_request"}.get(status, "refused")
        response = ErrorResponse(status, code, f"{request.method} {request.url.path[:200]}: {error.detail}.")
        response.headers.update(error.headers or {})
        if status == 405:
            # Several routes share a path, and each knows only its own methods.
            routes = (route for route in app.routes if isinstance(route, Route))
            methods = {
                method for route in routes if route.path_regex.match(request.url.path) for method in route.methods or ()
            }
            response.headers["Allow"] = ", ".join(sorted(methods))
        return respond(response)


def _add_proxy_schema(app: FastAPI) -> None:
    """Add the proxy, which FastAPI does not serve, to the OpenAPI document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = generate()
            responses = {
                str(status): _error_schema(status) for status in (400, 401, 403, 404, 405, 408, 409, 413, 502, 504)
            }
            responses["default"] = {"description": "the session's response"}
            parameters = [
                _SESSION_TOKEN,
                {
                    "name": "session_id",
                    "in": "path",
                    "required": True,
                    "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
                },
                {
                    "name": "path",
                    "in": "path",
                    "required": True,
                    "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*$", "maxLength": 1000},
                },
            ]
            schema["paths"]["/proxy/{session_id}/{path}"] = {
                method: {
                    "operationId": f"proxy_{method}",
                    "summary": "Forward a request to a session; renews its lease.",
                    "parameters": parameters,
                    "responses": responses,
                }
                for method in ("get", "post", "put", "patch", "delete")
            }
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _error_schema(status: int) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/GatewayError"}
    return {"description": _MEANING[status], "content": {"application/json": {"schema": schema}}}
