"""The name of a run: made once, checked at every door, because it becomes the name of a directory."""

from __future__ import annotations

import re
import secrets
import time

from palaestra.errors import UnknownRun

__all__ = ["checked_run_id", "fresh_run_id"]

_RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,89}")
_LONGEST_STEM = 63


def fresh_run_id(stem: str) -> str:
    """A new name: readable, sortable by time, and unlike any other."""
    readable = re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")[:_LONGEST_STEM] or "run"
    return f"{readable}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def checked_run_id(text: str) -> str:
    """The id as it stands, or `UnknownRun`: nothing else can be the name of a run's directory."""
    if not _RUN_ID.fullmatch(text) or ".." in text:
        raise UnknownRun("run", text, "is not the id of a run", "palaestra runs list shows them")
    return text
