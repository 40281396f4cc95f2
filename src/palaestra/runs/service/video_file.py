"""A clip's bytes, whole or a part of them, and nothing else that lies beside it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import FileResponse

from palaestra.errors import ConfigError, UnknownRun
from palaestra.files.run_directory import RunDirectory
from palaestra.runs.service.answers import errors
from palaestra.runs.video.clip import Clip, clips_of

__all__ = ["clip_answers", "clip_file", "clip_name"]

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


def clip_name(clip: Clip, run: RunDirectory) -> str:
    """What a clip is called among those of its run: a trainer may use the same file name in two directories."""
    return str(Path(clip.path).relative_to(run.path))


def clip_file(run: RunDirectory, name: str, wanted: str | None) -> FileResponse:
    """The clip of this name, for a client that asks for these bytes; `UnknownRun` when it is not one of the run's."""
    found = next((clip for clip in clips_of(run) if name == clip_name(clip, run)), None)
    if found is None:
        raise UnknownRun("video", name, "the run has no such clip", f"GET /runs/{run.run_id}/videos lists them")
    facts = os.stat(found.path)
    if wanted is not None:
        _check(wanted, facts.st_size)
    return FileResponse(found.path, stat_result=facts)


def clip_answers() -> dict[int | str, dict[str, Any]]:
    """Their descriptions, for OpenAPI."""
    binary = {"schema": {"type": "string", "format": "binary"}}
    content = {"content": {kind: binary for kind in ("video/webm", "video/mp4", "image/gif")}}
    whole, part = {"description": "the clip", **content}, {"description": "a part of it", **content}
    return {200: whole, 206: part, **errors(404, 416)}


def _check(wanted: str, size: int) -> None:
    """The file's own answers to a bad range would be plain text."""
    asked = _RANGE.fullmatch(wanted.strip())
    first, last = asked.groups() if asked is not None else ("", "")
    if not first + last or (first and last and int(last) < int(first)):
        raise ConfigError("Range", wanted, "is not one range of bytes", "Send for example bytes=0-999")
    if (first and int(first) >= size) or (not first and int(last) == 0):
        raise HTTPException(416, f"the clip has {size} bytes", {"Content-Range": f"bytes */{size}"})
