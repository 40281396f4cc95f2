"""Configuration files: YAML or JSON (comments allowed) into plain data, and `key.path=value` on top.

Reads text, decides nothing about meaning: `train.config` does that.
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

__all__ = ["apply_overrides", "is_ui_config", "move_keys", "parse_override", "read_config_file", "set_value"]

_LONGEST = 1 << 20
_DEEPEST = 64
_MOST_VALUES = 100_000
PATHS = ("policy.vla_config.model_path",)
"""Keys of a training configuration that name files."""


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

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        """Refuse a number that would become infinite without saying so."""
        value = super().construct_yaml_float(node)
        if math.isinf(value) and "inf" not in node.value.lower():
            problem = f"{node.value} is more than a number can hold"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return value


_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)
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


def read_config_file(path: Path, examples: Path | None = None) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; a refusal points to `examples`, a directory of files that would do."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        raise ConfigError("config file", str(path), reason, _near(path, examples)) from None
    except UnicodeDecodeError:
        raise ConfigError("config file", str(path), "is not text", "Give a YAML or JSON file") from None
    if len(text) > _LONGEST:
        raise ConfigError("config file", str(path), f"is longer than {_LONGEST >> 20} MB", "Give a YAML or JSON file")
    try:
        data = _json(text) if path.suffix == ".json" else _yaml(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError("config file", str(path), f"is not JSON: {error.msg} at {where}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError("config file", str(path), f"is not YAML: {_problem(error)}{where}") from None
    except _Unbearable as error:
        raise ConfigError("config file", str(path), str(error)) from None
    if not isinstance(data, dict):
        kind = "empty" if data is None else f"a {type(data).__name__}"
        remedy = "Write KEY: VALUE lines" if examples is None else f"See {examples}/"
        raise ConfigError("config file", str(path), f"is {kind}, not a mapping of sections", remedy)
    return _with_paths_beside(data, path.parent)


def _with_paths_beside(data: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Make paths in a configuration absolute: they mean what lies beside the file, wherever a command is given.

    What is not there, and is where the command is given, means that.
    """
    for key in PATHS:
        *sections, last = key.split(".")
        place: Any = data
        for section in sections:
            place = place.get(section) if isinstance(place, dict) else None
        if isinstance(place, dict) and isinstance(place.get(last), str) and place[last]:
            place[last] = _absolute(place[last], (directory, Path.cwd()))
    return data


def _absolute(path: str, directories: Sequence[Path]) -> str:
    places = [(directory / Path(path).expanduser()).absolute() for directory in directories]
    return str(next((place for place in places if place.exists()), places[0]))


class _Unbearable(Exception):
    """Well-formed, and no configuration that anybody wrote."""


def _json(text: str) -> Any:
    try:
        data = json.loads(strip_comments(text), object_pairs_hook=_unique_keys)
    except RecursionError:
        raise _Unbearable(_TOO_DEEP) from None
    _check(data, lambda one: one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
    return data


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key written twice, as in YAML."""
    try:
        return reject_duplicate_keys(pairs)
    except ValueError as error:
        raise _Unbearable(f"is ambiguous: {error}") from None


def _yaml(text: str) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        # Before anything is made of it: a few lines of aliases can stand for more than fits into memory.
        _check(node, _inside)
        return loader.construct_document(node)
    except RecursionError:
        raise _Unbearable(_TOO_DEEP) from None
    finally:
        loader.dispose()


def _inside(node: yaml.Node) -> Iterable[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else ()


_TOO_DEEP = f"is nested more than {_DEEPEST} levels deep"


def _check(document: Any, inside: Callable[[Any], Iterable[Any]]) -> None:
    """Refuse what contains itself, is too deep, or holds too many values once aliases are followed."""
    known: dict[int, tuple[int, int]] = {}
    under_way: set[int] = set()

    def look(one: Any, depth: int) -> tuple[int, int]:
        if id(one) in under_way:
            raise _Unbearable("is not YAML: an anchor that contains itself")
        if depth > _DEEPEST:
            raise _Unbearable(_TOO_DEEP)
        parts = inside(one)
        if not parts:
            return 1, 0
        if id(one) not in known:
            under_way.add(id(one))
            looked = [look(part, depth + 1) for part in parts]
            under_way.discard(id(one))
            known[id(one)] = 1 + sum(size for size, _ in looked), 1 + max(height for _, height in looked)
        size, height = known[id(one)]
        if depth + height > _DEEPEST:
            raise _Unbearable(_TOO_DEEP)
        if size > _MOST_VALUES:
            raise _Unbearable(f"holds more than {_MOST_VALUES:,} values")
        return size, height

    look(document, 0)


def _problem(error: yaml.YAMLError) -> str:
    return getattr(error, "problem", None) or "cannot be parsed"


def _near(path: Path, examples: Path | None) -> str:
    folder = next((place for place in (path, path.parent, examples) if place is not None and place.is_dir()), None)
    found = sorted(str(p) for p in folder.glob("*.y*ml") if p.is_file())[:5] if folder is not None else []
    return f"There are {', '.join(found)}" if found else "Check the path"


def strip_comments(text: str) -> str:
    """JSON without `// …` and `/* … */`; strings are left alone."""
    pattern = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
    return pattern.sub(lambda found: found.group() if found.group().startswith('"') else " ", text)


def apply_overrides(data: dict[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """A copy of `data` with each `key.path=value` put in; values are read as YAML, paths from the working directory."""
    result = copy.deepcopy(data)
    for assignment in assignments:
        set_value(result, *parse_override(assignment))
    return result


def parse_override(assignment: str) -> tuple[str, Any]:
    """Key and value of `key.path=value`; the value is read as YAML, a path from the working directory."""
    key, equals, text = assignment.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError("override", assignment, "is not key=value", "Write for example algorithm.learning_rate=1e-3")
    try:
        value = _yaml(text)
    except yaml.YAMLError as error:
        reason = f"is not a YAML value ({_problem(error)})"
        raise ConfigError(key, text, reason, "Quote it for the shell") from None
    except _Unbearable as error:
        raise ConfigError(key, text, str(error)) from None
    # Typed in a shell, a path means a file there; a run of the service is started elsewhere.
    return key, _absolute(value, [Path.cwd()]) if key in PATHS and value and isinstance(value, str) else value


def set_value(data: dict[str, Any], key: str, value: Any) -> None:
    """Put a value at a dotted key of nested sections, which are made where they are missing."""
    *path, last = key.split(".")
    place = data
    for part in path:
        inner = place[part] = {} if place.get(part) is None else place[part]
        if not isinstance(inner, dict):
            raise ConfigError(key, value, f"{part!r} holds {inner!r}, which has no keys")
        place = inner
    place[last] = value


def is_ui_config(data: Mapping[str, Any]) -> bool:
    """Whether a configuration speaks of a model that operates screens rather than of an environment."""
    return "model" in data and "env" not in data


def move_keys(data: Mapping[str, Any], places: Mapping[str, str]) -> dict[str, Any]:
    """A copy in which the keys of `places` (`section.key`) stand where they are read."""
    moved: dict[str, Any] = copy.deepcopy(dict(data))
    for old, new in places.items():
        (section, key), (there, name) = old.split("."), new.split(".")
        if not isinstance(moved.get(section), dict) or key not in moved[section]:
            continue
        value = moved[section].pop(key)
        known = moved.get(there) or {}
        if isinstance(known, Mapping) and known.get(name, value) != value:
            raise ConfigError(old, value, f"{new} says {known[name]!r}", "Give one of them")
        set_value(moved, new, value)
    return moved
