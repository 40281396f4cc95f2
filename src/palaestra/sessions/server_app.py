"""The session server's HTTP face: sessions by name, five routes each, and the same five for one implicit session.

`GET /act?action_type=…` is the query-string dialect of the same act. Anything on the way may repeat a GET, so it needs
a `step`, which makes the repetition harmless.

`build_app(make)` serves whatever sessions `make` gives, so the fake is served by the same code as a browser. Requests
are read by hand: an act is on every agent's path, and generic machinery would cost more than the work. An act, once
begun, is carried to its end even if the client leaves meanwhile; the client's retry is answered from memory.
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
from palaestra.sessions.query_language import read_query, row_report
from palaestra.sessions.session import Session
from palaestra.sessions.task import SCHEMA
from palaestra.sessions.wire import (
    MAX_BODY,
    STEP_HEADER,
    act_asked,
    begun_document,
    error_document,
    object_read,
    only,
    step_document,
    step_header,
    task_asked,
    written,
)
from palaestra.sessions.wire_schema import SESSION_ID, openapi

__all__ = ["IMPLICIT", "build_app"]

_log = logging.getLogger(__name__)

IMPLICIT = "default"
"""The session that the routes at the root act on; it is opened when first asked for."""

PROMPT_S = 5.0
"""How long the answer to a deletion waits for the session to be closed; an act may ask to wait for a minute."""

_ANY = object()
"""Stands for a name that was not asked for; null is one that was, and is refused."""

T = TypeVar("T")
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


class _Sessions:
    """The open sessions by name, and the acts that are under way."""

    def __init__(self, make: Callable[[], Session], new_id: Callable[[], str]) -> None:
        self._make, self._new_id = make, new_id
        self._open: dict[str, Session] = {}
        self._under_way: set[asyncio.Task[Any]] = set()

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

    def named(self, name: str) -> Session:
        session = self._open.get(name)
        if session is not None:
            return session
        raise SessionRefused("no_session", f"session_id = {name[:100]!r}: no such session is open.", status=404)

    def of(self, request: Request) -> Session:
        name = request.path_params.get("session_id")
        if name is not None:
            return self.named(name)
        if IMPLICIT not in self._open:
            self.open(IMPLICIT)
        return self._open[IMPLICIT]

    async def delete(self, name: str) -> None:
        """Its name is free at once. An act under way is not cut short; the answer does not wait for a long one."""
        session = self.named(name)
        del self._open[name]
        await asyncio.wait({self._begun(self._closed(session))}, timeout=PROMPT_S)

    async def close(self) -> None:
        sessions, self._open = list(self._open.values()), {}
        await asyncio.gather(*(self._closed(session) for session in sessions))
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=1.0)

    @staticmethod
    async def _closed(session: Session) -> None:
        try:
            await session.close()
        except Exception:  # noqa: BLE001  one that does not want to go must not keep the others
            _log.exception("a session did not close")

    async def to_the_end(self, doing: Coroutine[Any, Any, T]) -> T:
        """Do it, also when the one who waits for it is cancelled: a step half done could not be answered again."""
        return await asyncio.shield(self._begun(doing))

    def _begun(self, doing: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(doing)
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # looked at: whoever waited for it may have left


class _Routes:
    """What is answered to each request."""

    def __init__(self, sessions: _Sessions) -> None:
        self._sessions = sessions

    async def root(self, request: Request) -> Response:
        """What clients of the query-string dialect ask to find out whether the server is ready."""
        text = f"Palaestra session server {__version__}: ready, {len(self._sessions.names())} sessions\n"
        return Response(text, media_type="text/plain")

    async def health(self, request: Request) -> Response:
        return _json({"schema": SCHEMA, "ready": True, "sessions": len(self._sessions.names())})

    async def open(self, request: Request) -> Response:
        document = object_read(await _body(request), absent={})
        only(document, "session_id")
        return _json({"session_id": self._sessions.open(**document)}, 201)

    async def list(self, request: Request) -> Response:
        return _json({"schema": SCHEMA, "sessions": self._sessions.names()})

    async def delete(self, request: Request) -> Response:
        name = request.path_params["session_id"]
        await self._sessions.delete(name)
        return _json({"deleted": name})

    async def session_health(self, request: Request) -> Response:
        self._sessions.of(request)
        return _json({"schema": SCHEMA, "ready": True, "session_id": request.path_params["session_id"]})

    async def reset(self, request: Request) -> Response:
        session = self._sessions.of(request)
        asked = task_asked(object_read(await _body(request)))

        async def begun() -> dict[str, Any]:
            spec = await session.reset(asked)
            return begun_document(spec, await session.progress())

        return _json(await self._sessions.to_the_end(begun()))

    async def act(self, request: Request) -> Response:
        session = self._sessions.of(request)
        number, action = act_asked(object_read(await _body(request)))
        return await self._act(session, action, number, picture=_asks_for(request, "image/"))

    async def act_by_query(self, request: Request) -> Response:
        if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            # An image in a web page is fetched by GET, with no Origin to know it by.
            raise SessionRefused("foreign_origin", "an act by GET is not for web pages of another origin.", status=403)
        session = self._sessions.of(request)
        asked = read_query(request.scope["query_string"])
        if asked.action is None:
            return await self.screenshot(request)
        if asked.step is None:
            text = "step: required and not given. A GET may be repeated on the way: number the acts, from 1 on."
            raise SessionRefused("step_required", text, status=422)
        picture = not _asks_for(request, "application/json")
        return await self._act(session, asked.action, asked.step, picture=picture)

    async def no_head(self, request: Request) -> Response:
        refusal = SessionRefused("method_not_allowed", "HEAD performs no act. Send GET or POST.")
        return _json(error_document(refusal), 405, headers={"Allow": "GET, POST"})

    async def _act(self, session: Session, action: UiAction, number: int, *, picture: bool) -> Response:
        step = await self._sessions.to_the_end(session.act(action, step=number))
        document = step_document(step)
        headers = {"Cache-Control": "no-store"}
        if not picture:
            return _json(document, headers=headers)
        headers |= {STEP_HEADER: step_header(document).decode("ascii"), "ETag": f'"{step.screenshot.sha256}"'}
        return Response(step.screenshot.data, headers=headers, media_type=step.screenshot.media_type)

    async def screenshot(self, request: Request) -> Response:
        picture = await self._sessions.of(request).screenshot()
        headers = {"ETag": f'"{picture.sha256}"', "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        if _asks_for(request, "application/json"):
            return _json(picture.facts(), headers=headers)
        return Response(picture.data, headers=headers, media_type=picture.media_type)

    async def progress(self, request: Request) -> Response:
        progress = await self._sessions.of(request).progress()
        return _json({**progress.facts(), **row_report(progress.detail)})


def build_app(
    make: Callable[[], Session],
    *,
    new_id: Callable[[], str] = lambda: secrets.token_hex(8),
    stop: Callable[[], Awaitable[None]] | None = None,
) -> FastAPI:
    """The server of the sessions that `make` gives; `stop` ends what they share, before they are closed."""
    sessions = _Sessions(make, new_id)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        if stop is not None:
            await stop()
        await sessions.close()

    app = FastAPI(
        title="Palaestra session server", version=__version__, lifespan=life, docs_url=None, redoc_url=None,
        redirect_slashes=False,
    )  # fmt: skip
    app.openapi = lambda: openapi(__version__)  # type: ignore[method-assign]
    routes = _Routes(sessions)
    own: dict[str, dict[str, Endpoint]] = {
        "reset": {"POST": routes.reset}, "screenshot": {"GET": routes.screenshot},
        "act": {"POST": routes.act, "GET": routes.act_by_query, "HEAD": routes.no_head},
        "progress": {"GET": routes.progress},
    }  # fmt: skip
    table: dict[str, dict[str, Endpoint]] = {
        # The hot path comes first: routes are tried in order.
        **{f"/sessions/{{session_id}}/{name}": methods for name, methods in own.items()},
        **{f"/{name}": methods for name, methods in own.items()},
        "/": {"GET": routes.root},
        "/health": {"GET": routes.health},
        "/sessions": {"POST": routes.open, "GET": routes.list},
        "/sessions/{session_id}": {"DELETE": routes.delete},
        "/sessions/{session_id}/health": {"GET": routes.session_health},
    }
    # One route per path, so that a method it does not have is answered with all that it has.
    app.router.routes[:0] = [Route(path, _answered(methods), methods=list(methods)) for path, methods in table.items()]
    app.add_exception_handler(HTTPException, _no_route)
    return app


def _answered(methods: Mapping[str, Endpoint]) -> Endpoint:
    """The endpoints of a path, with every error told as a document."""

    async def answer(request: Request) -> Response:
        endpoint = methods.get(request.method) or methods["GET"]  # HEAD is a GET whose body is not sent
        try:
            return await endpoint(request)
        except SessionRefused as refusal:
            after = None if refusal.retry_after is None else {"Retry-After": f"{refusal.retry_after:.0f}"}
            return _json(error_document(refusal), refusal.status, headers=after)
        except SessionFailed as failure:
            return _json(error_document(failure), 500)
        except ClientDisconnect:
            return Response(status_code=400)  # gone before its request was whole; nobody hears this
        except Exception:  # noqa: BLE001  whatever it is, the client is told and the log knows
            _log.exception("%s %s", request.method, request.url.path)
            return _json(error_document(PalaestraError("the server failed; its log says how.")), 500)

    return answer


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "bad_request")
    refusal = SessionRefused(code, f"{request.method} {request.url.path[:100]!r}: {error.detail}.")
    return _json(error_document(refusal), error.status_code, headers=error.headers)


async def _body(request: Request) -> bytes:
    """The request's body, unless it is too large: then not even the rest of it is read."""
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


def _asks_for(request: Request, media: str) -> bool:
    accept = request.headers.get("accept", "")
    return accept.lstrip().startswith(media)


def _json(document: dict[str, Any], status: int = 200, *, headers: Mapping[str, str] | None = None) -> Response:
    return Response(written(document), status, headers=headers, media_type="application/json")
