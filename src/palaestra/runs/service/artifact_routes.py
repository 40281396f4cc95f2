"""Routes that list and return the files of a run, and responses of files with ranges."""

# No `from __future__ import annotations`: FastAPI evaluates the annotations.
import os
import re
from typing import Annotated, BinaryIO, TypeAlias

from fastapi import FastAPI, Header, Path, Query
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from palaestra.errors import ConfigError
from palaestra.redaction import Redactor
from palaestra.runs.artifacts import Artifact, ArtifactKind, list_artifacts, open_artifact, read_part, read_redacted
from palaestra.runs.reader import RunReader
from palaestra.runs.service.schemas import NOT_FOUND, RunId, describe_errors, new_router
from palaestra.runs.wire import JsonObject, to_json

RangeHeader: TypeAlias = Annotated[str | None, Header(alias="Range", max_length=80)]
_JSON = "application/json"
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


def add_artifact_routes(app: FastAPI, reader: RunReader) -> None:
    """Add the routes to the application."""
    router = new_router("files")

    @router.get("/runs/{run_id}/artifacts", responses=NOT_FOUND, response_model=list[Artifact])
    def artifacts(
        run_id: RunId, kind: ArtifactKind | None = None, limit: Annotated[int, Query(ge=1, le=100_000)] = 10_000
    ) -> list[JsonObject]:
        """The files of a run that can be downloaded, by name."""
        return [to_json(artifact) for artifact in list_artifacts(reader.paths(run_id), kind)[:limit]]

    @router.get(
        "/runs/{run_id}/artifacts/{name:path}",
        response_class=StreamingResponse,
        responses=describe_file("the file", _JSON, "*/*"),
    )
    def artifact(
        run_id: RunId, name: Annotated[str, Path(max_length=1000)], wanted: RangeHeader = None
    ) -> StreamingResponse:
        """A file by its `name` in the list, or the part of it that a `Range` header names.

        Secrets in texts are replaced; these are sent whole, whatever the range.
        """
        artifact, file = open_artifact(reader.home, reader.paths(run_id), name)
        if artifact.redacted:
            content = read_redacted(file, artifact, Redactor.from_environment(os.environ))
            return StreamingResponse(content, media_type=artifact.media_type, headers={"accept-ranges": "none"})
        return send_file(file, artifact.media_type, wanted)

    app.include_router(router)


def send_file(file: BinaryIO, media_type: str, wanted: str | None) -> StreamingResponse:
    """A response with the bytes of an open file, or with the part that a `Range` header names."""
    size = os.fstat(file.fileno()).st_size
    headers = {"accept-ranges": "bytes"}
    try:
        first, stop = (0, size) if wanted is None else parse_range(wanted, size)
    except BaseException:
        file.close()
        raise
    headers["content-length"] = str(stop - first)
    if wanted is not None:
        headers["content-range"] = f"bytes {first}-{stop - 1}/{size}"
    status = 200 if wanted is None else 206
    return StreamingResponse(read_part(file, first, stop), status, headers, media_type)


def parse_range(header: str, size: int) -> tuple[int, int]:
    """The first byte of a `Range` and the byte behind its last one; `ConfigError` if it is bad."""
    match = _RANGE.fullmatch(header.strip())
    first, last = match.groups() if match is not None else ("", "")
    if not first + last or (first and last and int(last) < int(first)):
        raise ConfigError("Range", header, "is not one range of bytes", "Send for example bytes=0-999")
    if (first and int(first) >= size) or (not first and int(last) == 0):
        raise HTTPException(416, f"the file has {size} bytes", {"Content-Range": f"bytes */{size}"})
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1) if last else size


def describe_file(what: str, *media_types: str) -> dict[int | str, JsonObject]:
    """OpenAPI descriptions of a file, of a part of it, and of the error responses."""
    # A JSON file is any document.
    schemas = {kind: {} if kind == _JSON else {"type": "string", "format": "binary"} for kind in media_types}
    content = {"content": {kind: {"schema": schema} for kind, schema in schemas.items()}}
    return {
        200: {"description": what, **content},
        206: {"description": "a part of it", **content},
        **describe_errors(404, 416),
    }
