"""Presets: named values of forms, such as a training configuration that is used often.

A kind is what the form is for, `train/<runner>/<script>` for example; presets of different kinds never mix. Each preset
is one JSON file, `presets/<kind>/<name>.json` in the state directory, and is replaced atomically.
"""

from __future__ import annotations

import logging
import os
import re
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from palaestra.errors import ConfigError, UnknownRun
from palaestra.files.atomic import read_json, write_text
from palaestra.files.home import Home
from palaestra.redaction import redact_secrets
from palaestra.runs.spec import find_text_fault, find_value_fault
from palaestra.runs.wire import API_SCHEMA, JsonObject
from palaestra.strict_json import dump_json

_log = logging.getLogger(__name__)
_KIND = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}(/[A-Za-z0-9][A-Za-z0-9._-]{0,62}){0,3}")
_MAX_NAME_CHARACTERS = 80
_MAX_FILE_NAME_BYTES = 200
_MAX_BYTES = 256 * 1024
_MAX_PRESETS = 500
"""Of one kind."""


@dataclass(frozen=True)
class Preset:
    """Named values of a form."""

    __pydantic_config__ = API_SCHEMA

    kind: str
    """What the form is for, such as `train/cleanrl/dqn`."""
    name: str
    values: JsonObject
    saved: float
    """Unix time of the last change."""


def list_presets(home: Home, kind: str | None = None) -> list[Preset]:
    """The presets of a kind, or all of them, by kind and name. A damaged file is left out, with a warning."""
    pattern = "*.json" if kind is not None else "**/*.json"
    directory = home.presets if kind is None else _directory(home, kind)
    presets = (_read(home, path) for path in sorted(directory.glob(pattern)) if not path.name.startswith("."))
    readable = [preset for preset in presets if preset is not None]
    return sorted(readable, key=lambda preset: (preset.kind, preset.name.casefold(), preset.name))


def save_preset(home: Home, kind: str, name: str, values: JsonObject, clock: Callable[[], float]) -> Preset:
    """Create or replace a preset. `ConfigError` if the name or the values cannot be stored."""
    path = _path(home, kind, name)
    fault = find_value_fault(values)
    if fault:
        raise ConfigError("values", None, fault)
    if redact_secrets(values) != values:
        raise ConfigError("values", None, "hold a password or token and would be stored", "Leave it out")
    preset = Preset(kind, name, values, clock())
    text = dump_json({"schema": 1, **vars(preset)}, indent=2)
    if len(text) > _MAX_BYTES:
        raise ConfigError("values", len(text), f"are longer than {_MAX_BYTES:,} bytes", "Leave something out")
    if not path.exists() and sum(1 for _ in path.parent.glob("*.json")) >= _MAX_PRESETS:
        raise ConfigError("name", name, f"there are {_MAX_PRESETS} presets of {kind}", "Delete one first")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text + "\n")
    except OSError as error:
        raise ConfigError("preset", str(path), f"cannot be written ({error.strerror})") from None
    return preset


def delete_preset(home: Home, kind: str, name: str) -> Preset:
    """Delete a preset and return it. `UnknownRun` if there is none."""
    path = _path(home, kind, name)
    preset = _read(home, path) or Preset(kind, name, {}, 0.0)
    try:
        path.unlink()
    except FileNotFoundError:
        raise UnknownRun("preset", name, f"no such preset of {kind}", f"GET /presets?kind={kind} lists them") from None
    directory = path.parent
    while directory != home.presets and not any(directory.iterdir()):
        os.rmdir(directory)
        directory = directory.parent
    return preset


def _directory(home: Home, kind: str) -> Path:
    if not _KIND.fullmatch(kind) or ".." in kind:
        reason = "is not one to four words of letters, digits, dot, dash and underscore, separated by slashes"
        raise ConfigError("kind", kind, reason, "Write for example train/cleanrl/dqn")
    return home.presets / kind


def _path(home: Home, kind: str, name: str) -> Path:
    fault = find_text_fault(name, _MAX_NAME_CHARACTERS)
    if not fault and (not name.strip() or name != name.strip() or "/" in name):
        fault = "is empty, holds a slash, or begins or ends with a space"
    # Every other character is allowed in a name, so it is escaped in the name of the file.
    file = f"{urllib.parse.quote(name, safe=' ', errors='replace')}.json"
    if not fault and len(file) > _MAX_FILE_NAME_BYTES:
        fault = "is too long"
    if fault:
        raise ConfigError("name", name, fault, f"Use at most {_MAX_NAME_CHARACTERS} characters on one line")
    if file.startswith("."):
        file = f"%2E{file[1:]}"
    return _directory(home, kind) / file


def _read(home: Home, path: Path) -> Preset | None:
    """The preset in a file; None if there is none, or if it is damaged."""
    data = read_json(path)
    if data is None:
        if path.exists():
            _log.warning("%s: the preset cannot be read and is left out", path)
        return None
    try:
        kind, name, values, saved = str(data["kind"]), str(data["name"]), data["values"], float(data["saved"])
        if not isinstance(values, dict) or _path(home, kind, name) != path:
            raise ValueError("it is not of this kind and name")
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        _log.warning("%s: the preset cannot be read and is left out (%s)", path, error)
        return None
    return Preset(kind, name, values, saved)
