"""Configuration files: YAML or JSON (comments allowed) into plain data, and `key.path=value` on top.

Reads text, decides nothing about meaning: `train.config` does that.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from palaestra.errors import ConfigError

__all__ = ["is_ui_document", "overridden", "read_document"]


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `3e-4` as text because it lacks a dot; everybody who types it means a number.

    It reads `on` and `off` as booleans, too; here they are words, because `trainer.compiled` and others take them.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key written twice: YAML's last-one-wins would drop a whole section without a word."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


_READ_OTHERWISE = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:bool")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _READ_OTHERWISE]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)(?:[eE][-+]?[0-9]+)$|^[-+]?[0-9][0-9_]*\.[0-9_]*$|"
               r"^[-+]?\.[0-9_]+$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"),
    list("-+0123456789."),
)  # fmt: skip
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool",
    re.compile(r"^(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE)$"),
    list("yYnNtTfF"),
)


def read_document(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError("config file", str(path), f"cannot be read ({error.strerror})", _near(path)) from None
    except UnicodeDecodeError:
        raise ConfigError("config file", str(path), "is not text", "Give a YAML or JSON file") from None
    try:
        data = json.loads(without_comments(text)) if path.suffix == ".json" else yaml.load(text, _Loader)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError("config file", str(path), f"is not JSON: {error.msg} at {where}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise ConfigError("config file", str(path), f"is not YAML: {problem}{where}") from None
    if _contains_itself(data):
        raise ConfigError("config file", str(path), "is not YAML: an anchor that contains itself")
    if not isinstance(data, dict):
        kind = "empty" if data is None else f"a {type(data).__name__}"
        raise ConfigError("config file", str(path), f"is {kind}, not a mapping of sections", "See configs/ppo/")
    return data


def _contains_itself(data: Any, above: tuple[int, ...] = ()) -> bool:
    if not isinstance(data, dict | list):
        return False
    inner = data.values() if isinstance(data, dict) else data
    return id(data) in above or any(_contains_itself(part, (*above, id(data))) for part in inner)


def _near(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path("configs/ppo")
    found = sorted(str(p) for p in folder.glob("*.y*ml"))[:5]
    return f"There are {', '.join(found)}" if found else "Check the path"


def without_comments(text: str) -> str:
    """JSON without `// …` and `/* … */`; strings are left alone."""
    pattern = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
    return pattern.sub(lambda found: found.group() if found.group().startswith('"') else " ", text)


def overridden(data: dict[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """A copy of `data` with each `key.path=value` put in; values are read as YAML."""
    result = copy.deepcopy(data)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(
                "override", assignment, "is not key=value", "Write for example algorithm.learning_rate=1e-3"
            )
        try:
            value = yaml.load(text, _Loader)
        except yaml.YAMLError:
            raise ConfigError(key, text, "is not a YAML value", "Quote it for the shell") from None
        *path, last = key.split(".")
        place = result
        for part in path:
            inner = place[part] = {} if place.get(part) is None else place[part]
            if not isinstance(inner, dict):
                raise ConfigError(key, text, f"{part!r} holds {inner!r}, which has no keys")
            place = inner
        place[last] = value
    return result


def is_ui_document(data: Mapping[str, Any]) -> bool:
    """Whether a configuration speaks of a model that operates screens rather than of an environment."""
    return "model" in data and "env" not in data
