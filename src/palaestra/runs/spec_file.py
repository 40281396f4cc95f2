"""A configuration file as the client reads it: JSON or YAML, as data and as it was written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from palaestra.errors import ConfigError

__all__ = ["read_config", "run_name"]


def read_config(path: Path) -> tuple[dict[str, Any], str]:
    """The mapping in a file, and its text. `ConfigError` when there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError("config file", str(path), f"cannot be read ({error.strerror})", "Check the path") from None
    except UnicodeDecodeError:
        raise ConfigError("config file", str(path), "is not text", "Give a YAML or JSON file") from None
    data = _json(path, text) if path.suffix == ".json" else _yaml(path, text)
    if not isinstance(data, dict):
        raise ConfigError("config file", str(path), "is not a mapping of sections", "See configs/ppo/")
    return data, text


def run_name(given: object, path: Path | None) -> str:
    """How the id of a run begins: as its configuration says, else like its file; empty when there is neither."""
    stem = given if isinstance(given, str) and given else path.stem if path is not None else ""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:63]


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError("config file", str(path), f"is not JSON ({error})") from None


def _yaml(path: Path, text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads `3e-4` as a number, and `on` and `off` as words, as `palaestra train` does."""

    kept = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:bool")
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in kept]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    number = r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)(?:[eE][-+]?[0-9]+)|[-+]?[0-9][0-9_]*\.[0-9_]*|[-+]?\.[0-9_]+"
    Loader.add_implicit_resolver(kept[0], re.compile(f"^(?:{number}|[-+]?\\.inf|\\.nan)$"), list("-+0123456789."))
    truth = re.compile(r"^(?:yes|Yes|no|No|true|True|false|False)$")
    Loader.add_implicit_resolver(kept[1], truth, list("yYnNtTfF"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ConfigError("config file", str(path), f"is not YAML ({' '.join(str(error).split())})") from None
