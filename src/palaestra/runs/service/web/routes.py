"""Routes of the web page: its static files, the link that opens it, and the curves of a comparison."""

# No `from __future__ import annotations`: FastAPI evaluates the annotations.
import hashlib
import mimetypes
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated

from fastapi import FastAPI, Path, Query, Request
from fastapi.responses import RedirectResponse, Response
from pydantic import Field

from palaestra.errors import UnknownRun
from palaestra.runs.reader import RunReader
from palaestra.runs.service.schemas import NOT_FOUND, RUN_ID, RequestBody, ResponseBody, new_router
from palaestra.runs.service.web.access import LINK_LIFETIME_S, WEB_PREFIX, WebAccess

_INDEX = "index.html"


@dataclass(frozen=True)
class _StaticFile:
    content: bytes
    media_type: str
    etag: str


class WebLinkBody(RequestBody):
    """The page to open."""

    run_id: Annotated[str | None, Field(pattern=RUN_ID, max_length=90)] = None
    """A run id, or a unique prefix of one; null opens the table of runs."""


class WebLinkResponse(ResponseBody):
    """A link that gives one browser access to the web page."""

    path: str
    """Path and query of the link, to be appended to the address of the service."""
    expires_in_s: float
    """Seconds after which the link does not work any more. It also works only once."""


def add_web_routes(app: FastAPI, reader: RunReader, access: WebAccess) -> None:
    """Add the routes to the application."""
    router = new_router("web")
    static_files = _load_static_files()

    @router.post("/web/links", status_code=201, responses=NOT_FOUND)
    def create_web_link(body: WebLinkBody) -> WebLinkResponse:
        """Create a link that opens the web page in one browser, once, and gives it a cookie for reading."""
        target = WEB_PREFIX if body.run_id is None else f"{WEB_PREFIX}#/runs/{reader.run(body.run_id).run_id}"
        path = f"{WEB_PREFIX}open?link={access.create_link(target)}"
        return WebLinkResponse(path=path, expires_in_s=LINK_LIFETIME_S)

    @router.get("/web/open", include_in_schema=False)
    def open_web_link(request: Request, link: Annotated[str, Query(max_length=100)] = "") -> Response:
        target = access.redeem_link(link)
        if target is None:
            # The page asks for data and explains what to do when it is refused.
            return RedirectResponse(f"{WEB_PREFIX}#/expired", 303, {"cache-control": "no-store"})
        cookie = access.create_cookie(secure=request.url.scheme == "https")
        return RedirectResponse(target, 303, {"cache-control": "no-store", "set-cookie": cookie})

    @router.get("/web/", include_in_schema=False)
    def web_page(request: Request) -> Response:
        return _send_static(static_files[_INDEX], request)

    @router.get("/web/{name}", include_in_schema=False)
    def web_file(request: Request, name: Annotated[str, Path(max_length=100)]) -> Response:
        if name not in static_files:
            raise UnknownRun("file", name, "the web page has no such file", f"Open {WEB_PREFIX}")
        return _send_static(static_files[name], request)

    app.include_router(router)


def _load_static_files() -> dict[str, _StaticFile]:
    """All files of the page by name. Only these are served, so that no name reaches another file."""
    static_files = {}
    for entry in files("palaestra.runs.service.web").joinpath("static").iterdir():
        content = entry.read_bytes()
        kind = "text/javascript" if entry.name.endswith(".js") else mimetypes.guess_type(entry.name)[0]
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        static_files[entry.name] = _StaticFile(content, kind or "application/octet-stream", etag)
    return static_files


def _send_static(file: _StaticFile, request: Request) -> Response:
    # Revalidated at every use: a browser must not mix the files of two versions.
    headers = {"cache-control": "no-cache", "etag": file.etag}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(None, 304, headers)
    return Response(file.content, 200, headers, media_type=file.media_type)
