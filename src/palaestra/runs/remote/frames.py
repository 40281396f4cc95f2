"""Messages of the link between the run service and another machine: a line of JSON, then as many bytes as it says."""

from __future__ import annotations

import asyncio
import base64
import json

from palaestra.errors import PalaestraError
from palaestra.runs.wire import JsonObject

LOG_PREFIX = "@palaestra-link "
"""Marks a message in the log of a job, where everything is text and each message is one line."""
JOB_VARIABLE = "PALAESTRA_JOB"
"""Environment variable of a job that holds its request: JSON, zlib, base64; or `@` and a file of its code."""
CODE, NODE_HOME = "@palaestra-code@", "@palaestra-home@"
"""Stand in the request of a job for directories of the node that Ray chooses."""
_MAX_BODY_BYTES = 1 << 24


class LinkBroken(PalaestraError):
    """The other side sent something that is not a message, or stopped in the middle of one."""


def encode_frame(header: JsonObject, body: bytes = b"") -> bytes:
    """A message as bytes."""
    return json.dumps({**header, "bytes": len(body)}).encode() + b"\n" + body


async def read_frame(stream: asyncio.StreamReader) -> tuple[JsonObject, bytes] | None:
    """The next message; None at the end of the stream. `LinkBroken` if it is not a message."""
    try:
        line = await stream.readline()
    except ValueError:
        raise LinkBroken("a line of the link is too long") from None
    if not line:
        return None
    try:
        header = json.loads(line)
        size = int(header.pop("bytes"))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise LinkBroken(f"the other side answered {line[:200].decode(errors='replace')!r}") from None
    if not line.endswith(b"\n") or not 0 <= size <= _MAX_BODY_BYTES:
        raise LinkBroken("a message of the link is incomplete")
    try:
        return header, await stream.readexactly(size)
    except asyncio.IncompleteReadError:
        raise LinkBroken("a message of the link is incomplete") from None


def decode_log_line(line: str) -> tuple[JsonObject, bytes] | None:
    """The message in a line of a job's log; None for any other line."""
    if not line.startswith(LOG_PREFIX):
        return None
    try:
        header = json.loads(line.removeprefix(LOG_PREFIX))
        return header, base64.b64decode(header.pop("data"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
