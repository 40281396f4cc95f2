"""From values to command-line words, one list element each: nothing here can become another flag or a shell word.

Pure. The words are tyro's dialect: `--kebab-case value`, `--x` and `--no-x` for booleans, `--x=value` for whatever
begins with a dash.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from palaestra.config import closest_names
from palaestra.runs.runner import Finding
from palaestra.runs.runners.cleanrl_args import Kind, ScriptArgument

__all__ = ["argument_schema", "escapes", "flag_findings", "flag_words"]

_CALLED = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text", "list": "a list"}
_JSON = {"bool": "boolean", "int": "integer", "float": "number", "str": "string", "list": "array"}


def flag_findings(arguments: Sequence[ScriptArgument], values: Mapping[str, Any], script: str) -> list[Finding]:
    """What is wrong with the values; empty when the script will take them."""
    known = {argument.name: argument for argument in arguments}
    findings = []
    for name, value in values.items():
        argument = known.get(name)
        if argument is None:
            close = closest_names(name, known, count=1)
            remedy = f"Did you mean {close[0]!r}?" if close else f"{script} has {', '.join(sorted(known))}"
            findings.append(Finding("flag", "refused", f"{name}: {script} has no such argument", remedy))
        elif wrong := _wrong(argument, value):
            findings.append(Finding("flag", "refused", f"{name} = {value!r}: {wrong}", _usual(argument)))
        elif escapes(value):
            text = f"{name} = {value!r}: a value must not point out of the run's own directory"
            findings.append(Finding("path", "refused", text, "Give a plain relative name"))
    return findings


def flag_words(arguments: Sequence[ScriptArgument], values: Mapping[str, Any]) -> list[str]:
    """The words for values without findings, in the order of the script's own arguments."""
    return [word for argument in arguments if argument.name in values for word in _words(argument, values)]


def escapes(value: object) -> bool:
    """Whether text would be a path that leaves the directory it is used in."""
    if isinstance(value, list | tuple):
        return any(escapes(element) for element in value)
    return isinstance(value, str) and (value.startswith(("/", "~")) or ".." in value.split("/"))


def argument_schema(arguments: Iterable[ScriptArgument]) -> dict[str, Any]:
    """JSON Schema properties, for forms; `x-hidden` marks what a form need not show."""
    properties: dict[str, Any] = {}
    for argument in arguments:
        kinds = [_JSON.get(argument.kind, "string"), *(["null"] if argument.optional else [])]
        entry: dict[str, Any] = {"type": kinds if len(kinds) > 1 else kinds[0], "description": argument.help}
        if argument.kind == "list":
            entry["items"] = {"type": _JSON.get(argument.item, "string")}
        if argument.choices:
            entry["enum"] = list(argument.choices)
        if not argument.computed:
            entry["default"] = argument.default
        if argument.hidden:
            entry["x-hidden"] = True
        properties[argument.name] = entry
    return properties


def _usual(argument: ScriptArgument) -> str:
    return "" if argument.computed else f"Its default is {argument.default!r}"


def _wrong(argument: ScriptArgument, value: object) -> str:
    if value is None:
        return "" if argument.optional else "must have a value"
    if argument.kind == "other":
        return "is of a kind that cannot be given on a command line"
    if argument.kind == "list":
        if not isinstance(value, list | tuple):
            return "is not a list"
        bad = next((element for element in value if not _fits(argument.item, element)), None)
        dashed = any(isinstance(element, str) and element.startswith("-") for element in value)
        return f"holds {bad!r}" if bad is not None else "holds a word that begins with a dash" if dashed else ""
    if not _fits(argument.kind, value):
        return f"is not {_CALLED[argument.kind]}"
    if argument.choices and value not in argument.choices:
        return f"is not one of {', '.join(argument.choices)}"
    return ""


def _fits(kind: Kind, value: object) -> bool:
    if kind == "str":
        return isinstance(value, str) and "\0" not in value
    if kind == "bool":
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (kind == "float" and isinstance(value, float) and math.isfinite(value))


def _words(argument: ScriptArgument, values: Mapping[str, Any]) -> list[str]:
    name, value = argument.name.replace("_", "-"), values[argument.name]
    if argument.kind == "bool" and isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if argument.kind == "list" and value is not None:
        return [f"--{name}", *(str(element) for element in value)]
    text = str(value)
    return [f"--{name}={text}"] if text.startswith("-") or not text else [f"--{name}", text]
