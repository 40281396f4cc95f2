"""What may be forwarded to a session, and in what form: rules for paths and headers. Pure.

Works on the bytes as they came in, never on a decoded and re-encoded form: whatever two parsers could read differently
is refused instead of being repaired.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

from palaestra.errors import SessionRefused
from palaestra.sessions.wire import SESSION_TOKEN_HEADER

__all__ = ["PREFIX", "request_headers", "response_headers", "session_and_path"]

PREFIX = b"/proxy/"

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer trailers "
    b"transfer-encoding upgrade".split()
)
# Our own tokens and anybody's cookies end here; `host` names us, `expect` was answered by our own server.
_NOT_FOR_SESSIONS = _HOP_BY_HOP | frozenset(
    (b"authorization", b"cookie", b"host", b"expect", b"content-length", SESSION_TOKEN_HEADER.lower().encode())
)
# A page inside a session must not set cookies for the gateway's address.
_NOT_FOR_CLIENTS = _HOP_BY_HOP | frozenset((b"set-cookie", b"set-cookie2", b"server", b"date"))

_SESSION_ID = re.compile(rb"[A-Za-z0-9_-]{1,64}")
_PLAIN_PATH = re.compile(rb"[A-Za-z0-9_-]+(?:/[A-Za-z0-9_-]+)*")
_ENCODED_SEPARATOR = re.compile(rb"%(?:25)*(?:2f|5c|00)", re.IGNORECASE)
_PATH_CHARACTERS = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})+")


def session_and_path(raw_path: bytes) -> tuple[str, str]:
    """The session and the path inside it that `/proxy/{session_id}/{path}` names; refused with 400 otherwise."""
    session_id, _, path = raw_path.removeprefix(PREFIX).partition(b"/")
    if not session_id:
        raise _refused(raw_path, "names no session")
    if not _SESSION_ID.fullmatch(session_id):
        raise _refused(raw_path, "the session's id has characters that no id has")
    if not _PLAIN_PATH.fullmatch(path):
        _check(raw_path, path)
    return session_id.decode(), path.decode()


def _check(raw_path: bytes, path: bytes) -> None:
    if not path:
        raise _refused(raw_path, "names nothing to ask of the session", "Append reset, act, screenshot or progress")
    if b"://" in path or path.startswith(b"/"):
        raise _refused(raw_path, "an address of its own cannot be forwarded to")
    if not _PATH_CHARACTERS.fullmatch(path):
        raise _refused(raw_path, "has characters that no path has")
    if _ENCODED_SEPARATOR.search(path):
        raise _refused(raw_path, "hides a separator in an encoding")
    decoded = path
    # Each layer of encoding that somebody further on might take off is looked under.
    while decoded != (decoded := unquote_to_bytes(decoded)):
        pass
    segments = re.split(rb"[/\\]", decoded)
    if any(segment.partition(b";")[0].strip() in (b".", b"..") for segment in segments):
        raise _refused(raw_path, "climbs out of the session")
    if b"" in segments[:-1] or any(byte < 32 or byte == 127 for byte in decoded):
        raise _refused(raw_path, "has an empty part or a control character in it")


def _refused(raw_path: bytes, reason: str, remedy: str = "Write /proxy/{session_id}/{path}") -> SessionRefused:
    shown = raw_path[:200].decode("ascii", "backslashreplace")
    return SessionRefused("bad_path", f"path = {shown!r}: {reason}. {remedy}.", status=400)


def request_headers(headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """What of a request's headers a session gets to see."""
    return _without(headers, _NOT_FOR_SESSIONS)


def response_headers(headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """What of a session's headers the client gets to see."""
    return _without(headers, _NOT_FOR_CLIENTS)


def _without(headers: Sequence[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> Headers:
    lowered = [(name.lower(), value) for name, value in headers]
    # `Connection: x-one` makes x-one hop-by-hop, too.
    named = {part.strip().lower() for name, value in lowered if name == b"connection" for part in value.split(b",")}
    return [(name, value) for name, value in lowered if name not in dropped and name not in named]
