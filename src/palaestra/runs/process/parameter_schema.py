"""JSON Schema of the parameters of a class, as a probe found them: types from annotations, defaults, descriptions.

An annotation is read as text, because the classes in it exist in another interpreter only. Types that JSON has no word
for, such as functions, are left out of a union; a parameter without any other type is free text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from palaestra.runs.process.interpreter import ProbedParameter
from palaestra.runs.wire import JsonObject

_TYPES = {
    "bool": "boolean",
    "int": "integer",
    "float": "number",
    "str": "string",
    "None": "null",
    "dict": "object",
    "Dict": "object",
    "Mapping": "object",
    "list": "array",
    "List": "array",
    "tuple": "array",
    "Tuple": "array",
    "Sequence": "array",
}


def parameter_properties(
    parameters: Mapping[str, ProbedParameter], known: Mapping[str, JsonObject] | None = None
) -> JsonObject:
    """The schema of every parameter by name; `known` adds what signatures do not say, such as ranges and choices."""
    return {name: _describe(parameter) | dict((known or {}).get(name, {})) for name, parameter in parameters.items()}


def object_schema(properties: JsonObject) -> JsonObject:
    """The schema of an object with exactly these keys."""
    return {"type": "object", "properties": properties, "additionalProperties": False}


def is_object_only(parameter: ProbedParameter) -> bool:
    """Whether a parameter takes only Python objects, which no configuration can hold."""
    types, choices = _read_annotation(parameter.kind)
    return bool(parameter.kind) and not choices and not types - {"null"}


def _describe(parameter: ProbedParameter) -> JsonObject:
    types, choices = _read_annotation(parameter.kind)
    types = _widen(types, parameter.default)
    schema: JsonObject = {"description": parameter.description}
    if choices:
        schema["enum"] = choices
    elif types - {"null"}:
        ordered = sorted(types - {"null"}) + sorted(types & {"null"})
        schema["type"] = ordered[0] if len(ordered) == 1 else ordered
    else:
        schema["type"] = ["string", "null"] if "null" in types else "string"
    if not parameter.required and not parameter.opaque:
        schema["default"] = parameter.default
    return schema


def _widen(types: set[str], default: object) -> set[str]:
    """The types, with that of the default: annotations often leave None out."""
    if default is None:
        return types
    of_default = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}
    kind = of_default.get(type(default))
    is_known = kind is None or kind in types or (kind == "integer" and "number" in types)
    return types if is_known or kind is None else types | {kind}


def _read_annotation(text: str) -> tuple[set[str], list[object]]:
    """The JSON types and the choices of an annotation; types that JSON does not have are left out."""
    try:
        tree = ast.parse(text.strip() or "None", mode="eval").body if text.strip() else None
    except SyntaxError:
        return set(), []
    types: set[str] = set()
    choices: list[object] = []
    for part in _iterate_union(tree) if tree is not None else ():
        name = _outer_name(part)
        if name == "Literal" and isinstance(part, ast.Subscript):
            items = part.slice.elts if isinstance(part.slice, ast.Tuple) else [part.slice]
            choices += [item.value for item in items if isinstance(item, ast.Constant)]
        elif name in _TYPES:
            types.add(_TYPES[name])
    if choices and "null" in types:
        choices.append(None)
    return types, choices


def _iterate_union(node: ast.expr) -> Iterator[ast.expr]:
    """The alternatives of `X | Y`, `Union[X, Y]` and `Optional[X]`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from _iterate_union(node.left)
        yield from _iterate_union(node.right)
    elif isinstance(node, ast.Subscript) and _outer_name(node) in ("Union", "Optional"):
        for item in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
            yield from _iterate_union(item)
        if _outer_name(node) == "Optional":
            yield ast.Constant(None)
    else:
        yield node


def _outer_name(node: ast.expr) -> str:
    """The name of a type without its module and its arguments."""
    if isinstance(node, ast.Subscript):
        return _outer_name(node.value)
    if isinstance(node, ast.Constant):
        return "None" if node.value is None else ""
    return ast.unparse(node).rpartition(".")[2]
