"""Settings of the studio that survive a restart: theme, layout and last selections.

Written whole and atomically. A file that cannot be read is kept beside the new one, so that nothing is lost silently.
"""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

from palaestra.files.atomic import read_json, write_json

_T = TypeVar("_T")
_SCHEMA = 1


def settings_file() -> Path:
    """The settings file of the user."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "palaestra" / "studio.json"


class Settings:
    """Values by name, such as JSON can hold. A value of the wrong type reads as its default."""

    def __init__(self, path: Path | None) -> None:
        """`path` None keeps the settings in memory only."""
        self._path = path
        self._values: dict[str, Any] = {}
        self._is_changed = False
        self.problem = ""
        """Why the stored settings were not used; empty when they were."""
        if path is not None:
            self._load(path)

    def get(self, name: str, default: _T) -> _T:
        """A value, or the default if there is none of this type."""
        value = self._values.get(name, default)
        return deepcopy(value) if type(value) is type(default) or default is None else default

    def set(self, name: str, value: Any) -> None:
        """Change a value; `save` writes it."""
        if name not in self._values or self._values[name] != value:
            self._values[name] = deepcopy(value)
            self._is_changed = True

    def save(self) -> None:
        """Write the settings if they have changed. A disk that cannot be written is no reason to stop."""
        if not self._is_changed or self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, {**self._values, "schema": _SCHEMA}, durable=False)
            self._is_changed = False
        except OSError as error:
            self.problem = f"{self._path} cannot be written ({error.strerror})."

    def _load(self, path: Path) -> None:
        try:
            stored = read_json(path) if path.exists() else {"schema": _SCHEMA}
        except (OSError, RecursionError):  # a directory that is closed to the user; brackets without an end
            stored = None
        if stored is not None and stored.get("schema") == _SCHEMA:
            self._values = {name: value for name, value in stored.items() if name != "schema"}
            return
        aside = path.with_suffix(".unreadable.json")
        try:
            os.replace(path, aside)
            self.problem = f"The settings could not be read and were moved to {aside}."
        except OSError as error:
            self.problem = f"{path} cannot be read ({error.strerror})."
