"""The HTTP routes of a session server: those of named sessions, and the same for one implicit session.

`GET /act?action_type=…` is an act in the query-string dialect. Proxies may repeat a GET, so it needs a `step`, which
makes the repetition safe.

`build_app(make)` serves the sessions that `make` returns, fake or browser. Requests are parsed by hand, because every
act passes here and a framework would cost more than the work itself. An act is completed even if the client disconnects
meanwhile; the client's retry gets the stored result.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias, TypeVar

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from palaestra import __version__
from palaestra.errors import PalaestraError, SessionFailed, SessionRefused
from palaestra.sessions.action import UiAction
from palaestra.sessions.query_language import parse_query, row_report
from palaestra.sessions.server.openapi import SESSION_ID, build_openapi
from palaestra.sessions.session import Session
from palaestra.sessions.task import SCHEMA
from palaestra.sessions.wire import (
    MAX_BODY,
    STEP_HEADER,
    check_keys,
    encode_json,
    error_document,
    parse_act,
    parse_object,
    parse_task,
    reset_document,
    step_document,
    step_header,
)

_log = logging.getLogger(__name__)

IMPLICIT = "default"
"""The session of the routes without a session id; it is opened on first use."""

CLOSE_WAIT_S = 5.0
"""Seconds the response to a deletion waits for the session to close; an act may take a minute."""

_ANY = object()
"""Default of a session id that was not given; an explicit null is refused."""

T = TypeVar("T")
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


class _Sessions:
    """The open sessions by name, and the acts in progress."""

    def __init__(self, make: Callable[[], Session], new_id: Callable[[], str]) -> None:
        self._make, self._new_id = make, new_id
        self._open: dict[str, Session] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def names(self) -> list[str]:
        return sorted(self._open)

    def open(self, session_id: Any = _ANY) -> str:
        name = self._new_id() if session_id is _ANY else session_id
        if not isinstance(name, str) or not re.fullmatch(SESSION_ID, name):
            text = f"session_id = {str(name)[:100]!r}: must be 1 to 64 of a-z, 0-9 and '-'."
            raise SessionRefused("bad_request", text, status=422)
        if name in self._open:
            raise SessionRefused("session_exists", f"session_id = {name!r}: is open already.", status=409)
        self._open[name] = self._make()
        return name

    def get(self, name: str) -> Session:
        session = self._open.get(name)
        if session is not None:
            return session
        raise SessionRefused("no_session", f"session_id = {name[:100]!r}: no such session is open.", status=404)

    def for_request(self, request: Request) -> Session:
        name = request.path_params.get("session_id")
        if name is not None:
            return self.get(name)
        if IMPLICIT not in self._open:
            self.open(IMPLICIT)
        return self._open[IMPLICIT]

    async def delete(self, name: str) -> None:
        """Delete a session; its name is free at once. An act in progress is completed, but not always awaited."""
        session = self.get(name)
        del self._open[name]
        await asyncio.wait({self._spawn(self._close_session(session))}, timeout=CLOSE_WAIT_S)

    async def close(self) -> None:
        sessions, self._open = list(self._open.values()), {}
        await asyncio.gather(*(self._close_session(session) for session in sessions))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    @staticmethod
    async def _close_session(session: Session) -> None:
        try:
            await session.close()
        except Exception:  # noqa: BLE001  one session must not prevent closing the others
            _log.exception("a session did not close")

    async def complete(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, also when the request is cancelled, so that a retry gets its result."""
        return await asyncio.shield(self._spawn(coroutine))

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, because the request may have been cancelled


class _Routes:
    """The endpoints."""

    def __init__(self, sessions: _Sessions) -> None:
        self._sessions = sessions

    async def root(self, request: Request) -> Response:
        """The readiness check of clients of the query-string dialect."""
        text = f"Palaestra session server {__version__}: ready, {len(self._sessions.names())} sessions\n"
        return Response(text, media_type="text/plain")

    async def health(self, request: Request) -> Response:
        return _json({"schema": SCHEMA, "ready": True, "sessions": len(self._sessions.names())})

    async def open(self, request: Request) -> Response:
        document = parse_object(await _read_body(request), default={})
        check_keys(document, "session_id")
        return _json({"session_id": self._sessions.open(**document)}, 201)

    async def list(self, request: Request) -> Response:
        return _json({"schema": SCHEMA, "sessions": self._sessions.names()})

    async def delete(self, request: Request) -> Response:
        name = request.path_params["session_id"]
        await self._sessions.delete(name)
        return _json({"deleted": name})

    async def session_health(self, request: Request) -> Response:
        self._sessions.for_request(request)
        return _json({"schema": SCHEMA, "ready": True, "session_id": request.path_params["session_id"]})

    async def reset(self, request: Request) -> Response:
        session = self._sessions.for_request(request)
        task_request = parse_task(parse_object(await _read_body(request)))

        async def reset() -> dict[str, Any]:
            spec = await session.reset(task_request)
            return reset_document(spec, await session.progress())

        return _json(await self._sessions.complete(reset()))

    async def act(self, request: Request) -> Response:
        session = self._sessions.for_request(request)
        number, action = parse_act(parse_object(await _read_body(request)))
        return await self._act(session, action, number, as_image=_accepts(request, "image/"))

    async def act_by_query(self, request: Request) -> Response:
        if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            # Browsers fetch images of web pages by GET and without an Origin header.
            raise SessionRefused("foreign_origin", "an act by GET is not for web pages of another origin.", status=403)
        session = self._sessions.for_request(request)
        query = parse_query(request.scope["query_string"])
        if query.action is None:
            return await self.screenshot(request)
        if query.step is None:
            text = "step: required and not given. A proxy may repeat a GET: number the acts from 1."
            raise SessionRefused("step_required", text, status=422)
        as_image = not _accepts(request, "application/json")
        return await self._act(session, query.action, query.step, as_image=as_image)

    async def no_head(self, request: Request) -> Response:
        refusal = SessionRefused("method_not_allowed", "HEAD performs no act. Send GET or POST.")
        return _json(error_document(refusal), 405, headers={"Allow": "GET, POST"})

    async def _act(self, session: Session, action: UiAction, number: int, *, as_image: bool) -> Response:
        step = await self._sessions.complete(session.act(action, step=number))
        document = step_document(step)
        headers = {"Cache-Control": "no-store"}
        if not as_image:
            return _json(document, headers=headers)
        headers |= {STEP_HEADER: step_header(document).decode("ascii"), "ETag": f'"{step.screenshot.sha256}"'}
        return Response(step.screenshot.data, headers=headers, media_type=step.screenshot.media_type)

    async def screenshot(self, request: Request) -> Response:
        screenshot = await self._sessions.for_request(request).screenshot()
        headers = {"ETag": f'"{screenshot.sha256}"', "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        if _accepts(request, "application/json"):
            return _json(screenshot.facts(), headers=headers)
        return Response(screenshot.data, headers=headers, media_type=screenshot.media_type)

    async def progress(self, request: Request) -> Response:
        progress = await self._sessions.for_request(request).progress()
        return _json({**progress.facts(), **row_report(progress.detail)})


def build_app(
    make: Callable[[], Session],
    *,
    new_id: Callable[[], str] = lambda: secrets.token_hex(8),
    stop: Callable[[], Awaitable[None]] | None = None,
) -> FastAPI:
    """The application for sessions that `make` returns; `stop` stops what they share before they are closed."""
    sessions = _Sessions(make, new_id)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        if stop is not None:
            await stop()
        await sessions.close()

    app = FastAPI(
        title="Palaestra session server",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.openapi = lambda: build_openapi(__version__)  # type: ignore[method-assign]
    routes = _Routes(sessions)
    session_routes: dict[str, dict[str, Endpoint]] = {
        "reset": {"POST": routes.reset},
        "screenshot": {"GET": routes.screenshot},
        "act": {"POST": routes.act, "GET": routes.act_by_query, "HEAD": routes.no_head},
        "progress": {"GET": routes.progress},
    }
    table: dict[str, dict[str, Endpoint]] = {
        # The most frequent routes come first, because routes are tried in order.
        **{f"/sessions/{{session_id}}/{name}": methods for name, methods in session_routes.items()},
        **{f"/{name}": methods for name, methods in session_routes.items()},
        "/": {"GET": routes.root},
        "/health": {"GET": routes.health},
        "/sessions": {"POST": routes.open, "GET": routes.list},
        "/sessions/{session_id}": {"DELETE": routes.delete},
        "/sessions/{session_id}/health": {"GET": routes.session_health},
    }
    # One route per path, so that a 405 response lists all methods of the path.
    app.router.routes[:0] = [Route(path, _dispatch(methods), methods=list(methods)) for path, methods in table.items()]
    app.add_exception_handler(HTTPException, _handle_http_error)
    return app


def _dispatch(methods: Mapping[str, Endpoint]) -> Endpoint:
    """One endpoint for all methods of a path, which returns every error as a document."""

    async def handle(request: Request) -> Response:
        endpoint = methods.get(request.method) or methods["GET"]  # HEAD is a GET without a body
        try:
            return await endpoint(request)
        except SessionRefused as refusal:
            after = None if refusal.retry_after is None else {"Retry-After": f"{refusal.retry_after:.0f}"}
            return _json(error_document(refusal), refusal.status, headers=after)
        except SessionFailed as failure:
            return _json(error_document(failure), 500)
        except ClientDisconnect:
            return Response(status_code=400)  # the client disconnected before its request was complete
        except Exception:  # noqa: BLE001  unexpected errors are logged and reported
            _log.exception("%s %s", request.method, request.url.path)
            return _json(error_document(PalaestraError("the server failed; see its log.")), 500)

    return handle


async def _handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "bad_request")
    refusal = SessionRefused(code, f"{request.method} {request.url.path[:100]!r}: {error.detail}.")
    return _json(error_document(refusal), error.status_code, headers=error.headers)


async def _read_body(request: Request) -> bytes:
    """The request's body; a body that is too large is refused without reading the rest."""
    too_large = SessionRefused("too_large", f"the body is larger than {MAX_BODY} bytes.", status=413)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_BODY:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def _accepts(request: Request, media: str) -> bool:
    accept = request.headers.get("accept", "")
    return accept.lstrip().startswith(media)


def _json(document: dict[str, Any], status: int = 200, *, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode_json(document), status, headers=headers, media_type="application/json")
