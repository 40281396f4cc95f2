"""Run ids: made once, and checked wherever one comes in, because an id becomes the name of a directory."""

from __future__ import annotations

import re
import secrets
import time

from palaestra.errors import UnknownRun

__all__ = ["check_run_id", "new_run_id"]

_RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,89}")
_LONGEST_STEM = 63


def new_run_id(stem: str) -> str:
    """A readable id that sorts by time and differs from every other."""
    readable = re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")[:_LONGEST_STEM] or "run"
    return f"{readable}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def check_run_id(text: str) -> str:
    """The id itself; `UnknownRun` when it cannot be the name of a run's directory."""
    if not _RUN_ID.fullmatch(text) or ".." in text:
        raise UnknownRun("run", text, "is not the id of a run", "palaestra runs list shows them")
    return text
