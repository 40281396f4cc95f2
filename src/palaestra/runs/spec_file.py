"""A configuration file as the client reads it: JSON or YAML, as data and as it was written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from palaestra.config.file import read_config_file

__all__ = ["read_config", "run_name"]


def read_config(path: Path) -> tuple[dict[str, Any], str]:
    """The mapping in a file, and its text. `ConfigError` when there is none."""
    return read_config_file(path), path.read_text(encoding="utf-8")


def run_name(given: object, path: Path | None) -> str:
    """How the id of a run begins: as its configuration says, else like its file; empty when there is neither."""
    stem = given if isinstance(given, str) and given else path.stem if path is not None else ""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:63]
