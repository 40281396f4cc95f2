"""Arguments of a training script: what their declarations say, their JSON Schema, and whether values fit them.

The declarations are fields of a dataclass, read from the source without running it.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from palaestra.config import closest_names
from palaestra.runs.runner import Finding
from palaestra.runs.wire import JsonObject

Kind = Literal["bool", "int", "float", "str", "list", "other"]
_KINDS: dict[str, Kind] = {"bool": "bool", "int": "int", "float": "float", "str": "str"}
_LISTS = frozenset({"Sequence", "List", "list", "Tuple", "tuple"})
_KIND_NAMES = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}
_JSON_TYPES = {"bool": "boolean", "int": "integer", "float": "number", "str": "string", "list": "array"}


@dataclass(frozen=True)
class ScriptArgument:
    """One field of the script's dataclass."""

    name: str
    kind: Kind
    default: object = None
    help: str = ""
    optional: bool = False
    """Whether None is a valid value."""
    choices: tuple[str, ...] = ()
    item: Kind = "str"
    """Kind of the elements of a list."""
    computed: bool = False
    """The default is an expression that only the script can evaluate."""
    hidden: bool = False
    """Not for forms: the script computes the value, or it is the name of the experiment."""


def iterate_imports(tree: ast.Module) -> Iterator[str]:
    """Modules that a script imports at its top level."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def parse_default(value: ast.expr | None) -> tuple[Any, bool]:
    """The default, and whether only the script can compute it."""
    if value is None:
        return None, True
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("int", "float") and len(value.args) == 1:
        inner, computed = parse_default(value.args[0])  # int(1e6) is a common spelling of a million
        return (None, True) if computed else ((int if ast.unparse(value.func) == "int" else float)(inner), False)
    try:
        return ast.literal_eval(value), False
    except (ValueError, TypeError, SyntaxError):
        return None, True


def parse_type(annotation: ast.expr) -> tuple[Kind, Kind, bool, tuple[str, ...]]:
    """Kind, kind of elements, whether None is allowed, choices."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return parse_type(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        sides = [side for side in (annotation.left, annotation.right) if ast.unparse(side) != "None"]
        kind, item, _, choices = parse_type(sides[0]) if len(sides) == 1 else ("other", "str", True, ())
        return kind, item, True, choices
    if isinstance(annotation, ast.Subscript):
        return _parse_generic(annotation)
    return _KINDS.get(ast.unparse(annotation), "other"), "str", False, ()


def _parse_generic(annotation: ast.Subscript) -> tuple[Kind, Kind, bool, tuple[str, ...]]:
    outer = ast.unparse(annotation.value).removeprefix("typing.")
    inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    if outer == "Optional":
        kind, item, _, choices = parse_type(inner[0])
        return kind, item, True, choices
    if outer == "Literal":
        return "str", "str", False, tuple(str(ast.literal_eval(element)) for element in inner)
    if outer in _LISTS:
        return "list", _KINDS.get(ast.unparse(inner[0]), "other"), False, ()
    return "other", "str", False, ()


def argument_schema(arguments: Iterable[ScriptArgument]) -> JsonObject:
    """JSON Schema properties; `x-hidden` marks arguments that a form need not show."""
    properties: JsonObject = {}
    for argument in arguments:
        types = [_JSON_TYPES.get(argument.kind, "string"), *(["null"] if argument.optional else [])]
        entry: JsonObject = {"type": types if len(types) > 1 else types[0], "description": argument.help}
        if argument.kind == "list":
            entry["items"] = {"type": _JSON_TYPES.get(argument.item, "string")}
        if argument.choices:
            entry["enum"] = list(argument.choices)
        if not argument.computed:
            entry["default"] = argument.default
        if argument.hidden:
            entry["x-hidden"] = True
        properties[argument.name] = entry
    return properties


def check_values(arguments: Sequence[ScriptArgument], values: Mapping[str, object], script: str) -> list[Finding]:
    """Problems with the values; empty if the script accepts them."""
    known = {argument.name: argument for argument in arguments}
    findings = []
    for name, value in values.items():
        argument = known.get(name)
        if argument is None:
            close = closest_names(name, known, count=1)
            remedy = f"Did you mean {close[0]!r}?" if close else f"{script} has {', '.join(sorted(known))}"
            findings.append(Finding("flag", "refused", f"{name}: {script} has no such argument", remedy))
        elif problem := _find_problem(argument, value):
            remedy = "" if argument.computed else f"Its default is {argument.default!r}"
            findings.append(Finding("flag", "refused", f"{name} = {value!r}: {problem}", remedy))
        elif leaves_directory(value):
            text = f"{name} = {value!r}: a value must not point outside the directory of the run"
            findings.append(Finding("path", "refused", text, "Give a plain relative name"))
    return findings


def _find_problem(argument: ScriptArgument, value: object) -> str:
    if value is None:
        return "" if argument.optional else "must have a value"
    if argument.kind == "other":
        return "has a type that cannot be given on a command line"
    if argument.kind == "list":
        if not isinstance(value, list | tuple):
            return "is not a list"
        invalid = next((element for element in value if not _has_kind(argument.item, element)), None)
        dashed = any(isinstance(element, str) and element.startswith("-") for element in value)
        return f"holds {invalid!r}" if invalid is not None else "holds a word that starts with a dash" if dashed else ""
    if not _has_kind(argument.kind, value):
        return f"is not {_KIND_NAMES[argument.kind]}"
    if argument.choices and value not in argument.choices:
        return f"is not one of {', '.join(argument.choices)}"
    return ""


def _has_kind(kind: Kind, value: object) -> bool:
    if kind == "str":
        return isinstance(value, str) and "\0" not in value
    if kind == "bool":
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (kind == "float" and isinstance(value, float) and math.isfinite(value))


def leaves_directory(value: object) -> bool:
    """Whether text, or an element of a list, is a path that leaves the directory it is used in."""
    if isinstance(value, list | tuple):
        return any(leaves_directory(element) for element in value)
    return isinstance(value, str) and (value.startswith(("/", "~")) or ".." in value.split("/"))
