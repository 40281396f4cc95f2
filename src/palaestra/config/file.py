"""Configuration files: reads YAML or JSON (with comments) as plain data, and applies `key.path=value` overrides.

The meaning of the keys is defined in `train.config`.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from palaestra.errors import ConfigError
from palaestra.strict_json import reject_duplicate_keys

_MAX_LENGTH = 1 << 20
_MAX_DEPTH = 64
_MAX_VALUES = 100_000
PATH_KEYS = ("policy.vla_config.model_path",)
"""Keys of a training configuration whose values are paths."""


class _Loader(yaml.SafeLoader):
    """YAML with two changes: `3e-4` is a number, although it has no dot, and `on` and `off` are strings.

    `trainer.compiled` and other keys have the values `on` and `off`.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse duplicate keys: YAML would silently drop all but the last one."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        """Refuse a number that is too large for a float."""
        value = super().construct_yaml_float(node)
        if math.isinf(value) and "inf" not in node.value.lower():
            problem = f"{node.value} is too large for a number"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return value


_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)
_REPLACED_TAGS = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:bool")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED_TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)(?:[eE][-+]?[0-9]+)$|^[-+]?[0-9][0-9_]*\.[0-9_]*$|"
        r"^[-+]?\.[0-9_]+$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool",
    re.compile(r"^(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE)$"),
    list("yYnNtTfF"),
)


def read_config_file(path: Path, examples: str = "") -> dict[str, Any]:
    """The mapping in a YAML or JSON file; `examples` is a sentence for errors that says where examples are."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        raise ConfigError("config file", str(path), reason, _suggest_files(path, examples)) from None
    except UnicodeDecodeError:
        raise ConfigError("config file", str(path), "is not text", "Give a YAML or JSON file") from None
    if len(text) > _MAX_LENGTH:
        raise ConfigError(
            "config file", str(path), f"is longer than {_MAX_LENGTH >> 20} MB", "Give a YAML or JSON file"
        )
    try:
        data = _parse_json(text) if path.suffix == ".json" else _parse_yaml(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError("config file", str(path), f"is not JSON: {error.msg} at {where}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError("config file", str(path), f"is not YAML: {_yaml_problem(error)}{where}") from None
    except _InvalidDocument as error:
        raise ConfigError("config file", str(path), str(error)) from None
    if not isinstance(data, dict):
        kind = "empty" if data is None else f"a {type(data).__name__}"
        remedy = examples or "Write KEY: VALUE lines"
        raise ConfigError("config file", str(path), f"is {kind}, not a mapping of sections", remedy)
    return _resolve_paths(data, path.parent)


def _resolve_paths(data: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Make paths in a configuration absolute: relative to the file, or else to the current directory."""
    for key in PATH_KEYS:
        *sections, last = key.split(".")
        place: Any = data
        for section in sections:
            place = place.get(section) if isinstance(place, dict) else None
        if isinstance(place, dict) and isinstance(place.get(last), str) and place[last]:
            place[last] = _resolve_path(place[last], (directory, Path.cwd()))
    return data


def _resolve_path(path: str, directories: Sequence[Path]) -> str:
    places = [(directory / Path(path).expanduser()).absolute() for directory in directories]
    return str(next((place for place in places if place.exists()), places[0]))


class _InvalidDocument(Exception):
    """A well-formed document that is ambiguous or too large."""


def _parse_json(text: str) -> Any:
    try:
        data = json.loads(strip_comments(text), object_pairs_hook=_unique_keys)
    except RecursionError:
        raise _InvalidDocument(_TOO_DEEP) from None
    _check_size(data, lambda one: one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
    return data


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate keys, as in YAML."""
    try:
        return reject_duplicate_keys(pairs)
    except ValueError as error:
        raise _InvalidDocument(f"is ambiguous: {error}") from None


def _parse_yaml(text: str) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        # Before construction: a few lines of aliases can expand to more than fits into memory.
        _check_size(node, _child_nodes)
        return loader.construct_document(node)
    except RecursionError:
        raise _InvalidDocument(_TOO_DEEP) from None
    finally:
        loader.dispose()


def _child_nodes(node: yaml.Node) -> Iterable[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else ()


_TOO_DEEP = f"is nested more than {_MAX_DEPTH} levels deep"


def _check_size(document: Any, children: Callable[[Any], Iterable[Any]]) -> None:
    """Refuse documents that contain themselves, are too deep, or have too many values with aliases expanded."""
    measured_nodes: dict[int, tuple[int, int]] = {}
    ancestors: set[int] = set()

    def measure(node: Any, depth: int) -> tuple[int, int]:
        if id(node) in ancestors:
            raise _InvalidDocument("is not YAML: an anchor contains itself")
        if depth > _MAX_DEPTH:
            raise _InvalidDocument(_TOO_DEEP)
        parts = children(node)
        if not parts:
            return 1, 0
        if id(node) not in measured_nodes:
            ancestors.add(id(node))
            measured = [measure(part, depth + 1) for part in parts]
            ancestors.discard(id(node))
            measured_nodes[id(node)] = 1 + sum(size for size, _ in measured), 1 + max(height for _, height in measured)
        size, height = measured_nodes[id(node)]
        if depth + height > _MAX_DEPTH:
            raise _InvalidDocument(_TOO_DEEP)
        if size > _MAX_VALUES:
            raise _InvalidDocument(f"holds more than {_MAX_VALUES:,} values")
        return size, height

    measure(document, 0)


def _yaml_problem(error: yaml.YAMLError) -> str:
    return getattr(error, "problem", None) or "cannot be parsed"


def _suggest_files(path: Path, examples: str) -> str:
    folder = next((place for place in (path, path.parent) if place.is_dir()), None)
    files = sorted(str(p) for p in folder.glob("*.y*ml") if p.is_file())[:5] if folder is not None else []
    return f"There are {', '.join(files)}" if files else examples or "Check the path"


def strip_comments(text: str) -> str:
    """Remove `// …` and `/* … */` from JSON, except inside strings."""
    pattern = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
    return pattern.sub(lambda match: match.group() if match.group().startswith('"') else " ", text)


def apply_overrides(data: dict[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """A copy of `data` with each `key.path=value` applied; see `parse_override`."""
    result = copy.deepcopy(data)
    for assignment in assignments:
        set_value(result, *parse_override(assignment))
    return result


def read_settings(path: Path | None, assignments: Sequence[str]) -> dict[str, Any]:
    """The settings of a server: those of its configuration file, if any, with each `key.path=value` applied."""
    return apply_overrides({} if path is None else read_config_file(path), assignments)


def parse_override(assignment: str) -> tuple[str, Any]:
    """Key and value of `key.path=value`; the value is YAML, and paths are relative to the current directory."""
    key, equals, text = assignment.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError("override", assignment, "is not key=value", "Write for example algorithm.learning_rate=1e-3")
    try:
        value = _parse_yaml(text)
    except yaml.YAMLError as error:
        reason = f"is not a YAML value ({_yaml_problem(error)})"
        raise ConfigError(key, text, reason, "Quote it for the shell") from None
    except _InvalidDocument as error:
        raise ConfigError(key, text, str(error)) from None
    # Absolute, because the run service starts runs in another directory.
    return key, _resolve_path(value, [Path.cwd()]) if key in PATH_KEYS and value and isinstance(value, str) else value


def set_value(data: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a dotted key in nested sections, creating missing sections."""
    *path, last = key.split(".")
    place = data
    for part in path:
        inner = place[part] = {} if place.get(part) is None else place[part]
        if not isinstance(inner, dict):
            raise ConfigError(key, value, f"{part!r} holds {inner!r}, which has no keys")
        place = inner
    place[last] = value


def is_ui_config(data: Mapping[str, Any]) -> bool:
    """Whether a configuration trains a model that operates screens rather than in an environment."""
    return "model" in data and "env" not in data


def move_keys(data: Mapping[str, Any], places: Mapping[str, str]) -> dict[str, Any]:
    """A copy with the keys of `places` (`section.key`) moved to their new sections."""
    moved: dict[str, Any] = copy.deepcopy(dict(data))
    for old, new in places.items():
        (section, key), (there, name) = old.split("."), new.split(".")
        if not isinstance(moved.get(section), dict) or key not in moved[section]:
            continue
        value = moved[section].pop(key)
        current = moved.get(there) or {}
        if isinstance(current, Mapping) and current.get(name, value) != value:
            raise ConfigError(old, value, f"{new} says {current[name]!r}", "Give one of them")
        set_value(moved, new, value)
    return moved
