"""Forms made from the JSON Schema of a runner: fields in groups, with units, defaults, ranges and messages.

A form holds texts, as the user types them, and only the values that differ from their defaults. What it cannot show as
a simple field (free mappings, lists of objects) is one field of JSON text, so that everything can be entered.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from palaestra.strict_json import read_json
from palaestra.studio.model.commands import match_score
from palaestra.studio.model.revision import Revised

Kind: TypeAlias = Literal["flag", "integer", "number", "text", "choice", "dataset", "json"]
GENERAL = "general"
_UNITS = {"_s": "s", "_seconds": "s", "_ms": "ms", "_mb": "MB", "_bytes": "bytes", "_steps": "steps"}
_DATASETS = "datasets"
"""Value of `x-choices` of a text that is the id of a dataset."""
_MAX_DEPTH = 3
_MAX_REFERENCES = 8
_EMPTY_WORDS = ("none", "null")
"""Texts that mean null where null is a value."""
_GROUPED_DIGITS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?")
"""Digits in groups of three: a comma elsewhere may be the decimal point of another language."""


class _Unset:
    """The absence of a default."""

    def __repr__(self) -> str:
        return "(none)"


UNSET = _Unset()


@dataclass(frozen=True, kw_only=True)
class FormField:
    """One value that can be set."""

    path: str
    """Dotted key: `trainer.total_timesteps`."""
    title: str
    group: str
    kind: Kind
    default: Any = UNSET
    description: str = ""
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    unit: str = ""
    can_be_empty: bool = False
    """Whether null is a value."""
    is_required: bool = False
    allows_text: bool = False
    """Whether a JSON field also takes plain text, as fields do that are a number or a word."""

    @property
    def range_text(self) -> str:
        """The range in words; empty without one."""
        low = _format_bound("above", self.above) or _format_bound("from", self.minimum)
        high = _format_bound("below", self.below) or _format_bound("up to", self.maximum)
        return f"{low} {high}".strip()

    def format(self, value: Any) -> str:
        """A value as the user would type it: `parse` makes the same value of it."""
        if value is UNSET:
            return ""
        if value is None:
            return _EMPTY_WORDS[0] if self.can_be_empty or None in self.choices else ""
        if isinstance(value, str):
            return json.dumps(value, ensure_ascii=False) if self._needs_quotes(value) else value
        return repr(value) if isinstance(value, float) else json.dumps(value)

    def parse(self, text: str) -> Any:
        """The value of a text; `ValueError` with the reason if it is none. An empty text is the default."""
        text = text.strip()
        if not text:
            if self.is_required:
                raise ValueError("is required")
            return UNSET
        if self.can_be_empty and text.lower() in _EMPTY_WORDS:
            return None
        return self._check_range(self._parse_kind(text))

    def _parse_kind(self, text: str) -> Any:
        if self.kind == "flag":
            if text.lower() not in ("true", "false"):
                raise ValueError("is neither true nor false")
            return text.lower() == "true"
        if self.kind == "integer":
            return _parse_integer(text)
        if self.kind == "number":
            return _parse_float(text, "is not a number")
        if self.kind == "choice":
            match = next((choice for choice in self.choices if self.format(choice) == text), UNSET)
            if match is UNSET:
                raise ValueError(f"is none of {', '.join(self.format(choice) for choice in self.choices)}")
            return match
        if self.kind == "json":
            try:
                return read_json(text)
            except ValueError as error:
                if self.allows_text:
                    return text
                raise ValueError(f"is not JSON ({error})") from None
        return _unquote(text)

    def _check_range(self, value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not _is_finite(value):
                raise ValueError("is not a finite number")
            is_low = (self.minimum is not None and value < self.minimum) or (
                self.above is not None and value <= self.above
            )
            is_high = (self.maximum is not None and value > self.maximum) or (
                self.below is not None and value >= self.below
            )
            if is_low or is_high:
                raise ValueError(f"must lie {self.range_text}")
        return value

    def _needs_quotes(self, value: str) -> bool:
        """Whether a text would be read as something else without quotation marks."""
        if self.kind in ("flag", "integer", "number"):
            return False  # a configuration file may hold 3e-4 as text
        if self.kind == "json":
            return not self.allows_text or not _is_plain(value) or _is_json(value)
        if not _is_plain(value) or (self.can_be_empty and value.lower() in _EMPTY_WORDS):
            return True
        return any(not isinstance(choice, str) and self.format(choice) == value for choice in self.choices)


class Form(Revised):
    """The fields of a schema, and what the user has entered."""

    def __init__(self, schema: Mapping[str, Any] | None = None, *, hidden: Sequence[str] = ()) -> None:
        """`hidden` are paths that are set elsewhere."""
        super().__init__()
        self.fields: dict[str, FormField] = {}
        self._texts: dict[str, str] = {}
        self._remarks: dict[str, str] = {}
        if schema:
            self.set_schema(schema, hidden=hidden)

    def set_schema(self, schema: Mapping[str, Any], *, hidden: Sequence[str] = ()) -> None:
        """Use another schema; texts of fields that it also has stay."""
        self.fields = {one.path: one for one in fields_of(schema) if one.path not in hidden}
        self._remarks.clear()
        self.touch()

    def text(self, path: str) -> str:
        """What the user has entered; empty for the default."""
        return self._texts.get(path, "")

    def set_text(self, path: str, text: str) -> None:
        """Enter a text."""
        if text.strip() == self._texts.get(path, ""):
            return
        if text.strip():
            self._texts[path] = text.strip()
        else:
            self._texts.pop(path, None)
        self._remarks.pop(path, None)
        self.touch()

    def load(self, values: Mapping[str, Any]) -> None:
        """Enter the values of a preset or of another run; keys that the schema does not have are left out."""
        self._texts = {}
        self._remarks.clear()
        for path, value in flatten(values).items():
            one = self.fields.get(path)
            if one is not None and not _is_same(value, one.default) and (text := one.format(value)):
                self._texts[path] = text
        self.touch()

    def problem(self, path: str) -> str:
        """Why the text of a field cannot be used; empty if it can. Remarks of a preflight come last."""
        one = self.fields[path]
        try:
            one.parse(self.text(path))
        except ValueError as error:
            return str(error)
        return self._remarks.get(path, "")

    def problems(self) -> dict[str, str]:
        """All fields that cannot be used, with the reason."""
        return {path: reason for path in self.fields if (reason := self.problem(path))}

    def add_remark(self, path: str, text: str) -> None:
        """Show a message of the service beside a field, until its text changes."""
        self._remarks[path] = text
        self.touch()

    def clear_remarks(self) -> None:
        """Forget the messages of the service."""
        if self._remarks:
            self._remarks.clear()
            self.touch()

    def has_kind(self, kind: Kind) -> bool:
        """Whether a field is of this kind."""
        return any(one.kind == kind for one in self.fields.values())

    def find_field(self, path: str) -> FormField | None:
        """The field of a key, or the one that holds it: `algorithm` for `algorithm.batch_size`."""
        while path and path not in self.fields:
            path = path.rpartition(".")[0]
        return self.fields.get(path)

    def changes(self) -> dict[str, Any]:
        """The values that differ from their defaults, nested. `ValueError` names the first invalid field."""
        config: dict[str, Any] = {}
        for path in self._texts:
            one = self.fields.get(path)
            if one is None:
                continue
            try:
                value = one.parse(self._texts[path])
            except ValueError as error:
                raise ValueError(f"{path} {error}") from None
            if value is not UNSET and not _is_same(value, one.default):
                *parents, last = path.split(".")
                place = config
                for parent in parents:
                    place = place.setdefault(parent, {})
                place[last] = value
        return config

    def groups(self, search: str = "") -> dict[str, list[FormField]]:
        """The fields by group, in the order of the schema; with a search, those that match."""
        groups: dict[str, list[FormField]] = {}
        for one in self.fields.values():
            text = f"{one.path} {one.title} {one.description}"
            if not search.strip() or all(word in text.lower() for word in search.lower().split()):
                groups.setdefault(one.group, []).append(one)
        if search.strip() and not groups:
            # Nothing holds the words: offer what is spelled alike.
            for one in self.fields.values():
                if match_score(search, one.path) is not None:
                    groups.setdefault(one.group, []).append(one)
        return groups


def fields_of(schema: Mapping[str, Any]) -> list[FormField]:
    """The fields of a JSON Schema; nested objects become dotted keys. Those marked `x-hidden` are left out.

    An optional object without a default becomes fields that need not be given: without any of them it is left out.
    """
    definitions = schema.get("$defs") or schema.get("definitions") or {}
    return list(_iterate(schema, definitions, (), {}))


def _iterate(
    schema: Mapping[str, Any],
    definitions: Mapping[str, Any],
    path: tuple[str, ...],
    defaults: Mapping[str, Any],
    *,
    is_optional: bool = False,
) -> Iterator[FormField]:
    required = () if is_optional else schema.get("required") or ()
    for name, raw in (schema.get("properties") or {}).items():
        part, can_be_empty = _resolve(raw, definitions)
        if part.get("x-hidden"):
            continue
        here = (*path, name)
        default = defaults.get(name, part.get("default", UNSET))
        if part.get("properties") and len(here) < _MAX_DEPTH and (not can_be_empty or default in (None, UNSET)):
            inner = default if isinstance(default, Mapping) else {}
            yield from _iterate(part, definitions, here, inner, is_optional=is_optional or can_be_empty)
            continue
        yield _field(name, here, part, default, can_be_empty=can_be_empty, is_required=name in required)


def _field(
    name: str, path: tuple[str, ...], part: Mapping[str, Any], default: Any, *, can_be_empty: bool, is_required: bool
) -> FormField:
    kind, choices = _kind(part)
    if choices and can_be_empty and None not in choices:
        choices = (*choices, None)
    unit = next((unit for suffix, unit in _UNITS.items() if name.endswith(suffix)), "")
    return FormField(
        path=".".join(path),
        title=name.replace("_", " "),
        group=path[0] if len(path) > 1 else GENERAL,
        kind=kind,
        default=default,
        description=" ".join(str(part.get("description", "")).split()),
        choices=choices,
        minimum=_number(part.get("minimum")),
        maximum=_number(part.get("maximum")),
        above=_number(part.get("exclusiveMinimum")),
        below=_number(part.get("exclusiveMaximum")),
        unit=unit,
        can_be_empty=can_be_empty,
        is_required=is_required and default is UNSET,
        allows_text=isinstance(part.get("type"), list) and "string" in part["type"],
    )


def _resolve(part: Any, definitions: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """A schema without references and without null, and whether null is allowed. `type` is a list for a union."""
    can_be_empty = False
    for _ in range(_MAX_REFERENCES):
        if not isinstance(part, Mapping):
            return {}, can_be_empty  # `true`: anything
        options = part.get("anyOf") or part.get("oneOf")
        if "$ref" in part:
            target = definitions.get(str(part["$ref"]).rpartition("/")[2], {})
            part = {**target, **{key: value for key, value in part.items() if key != "$ref"}}
        elif len(part.get("allOf") or ()) == 1:
            part = {**part["allOf"][0], **{key: value for key, value in part.items() if key != "allOf"}}
        elif options:
            resolved = [_resolve(one, definitions) for one in options]
            others = [one for one, _ in resolved if one.get("type") != "null"]
            can_be_empty = can_be_empty or len(others) < len(options) or any(empty for _, empty in resolved)
            rest = {key: value for key, value in part.items() if key not in ("anyOf", "oneOf")}
            if len(others) != 1:
                return {**rest, "type": [_type_name(one) for one in others]}, can_be_empty
            part = {**others[0], **rest}
        elif isinstance(part.get("type"), list) and "null" in part["type"]:
            can_be_empty = True
            part = {**part, "type": [one for one in part["type"] if one != "null"]}
        elif isinstance(part.get("type"), list) and len(part["type"]) == 1:
            part = {**part, "type": part["type"][0]}
        else:
            break
    return part, can_be_empty


def _type_name(part: Mapping[str, Any]) -> str:
    choices = _kind(part)[1]
    return "string" if choices and all(isinstance(one, str) for one in choices) else str(part.get("type", ""))


def _kind(part: Mapping[str, Any]) -> tuple[Kind, tuple[Any, ...]]:
    if "const" in part:
        return "choice", (part["const"],)
    if part.get("enum"):
        return "choice", tuple(part["enum"])
    if part.get("type") == "string" and part.get("x-choices") == _DATASETS:
        return "dataset", ()
    kinds: dict[str, Kind] = {"boolean": "flag", "integer": "integer", "number": "number", "string": "text"}
    kind = kinds.get(str(part.get("type", "")), "json")
    return kind, (True, False) if kind == "flag" else ()


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _format_bound(word: str, bound: float | None) -> str:
    if bound is None:
        return ""
    return f"{word} {bound:,.0f}" if bound.is_integer() and abs(bound) < 1e15 else f"{word} {bound:g}"


def _parse_integer(text: str) -> int:
    digits = text.replace(",", "") if _GROUPED_DIGITS.fullmatch(text) else text
    try:
        return int(digits)  # a float would round the last digits of a large seed
    except ValueError:
        number = _parse_float(digits, "is not a whole number")
    if not number.is_integer():
        raise ValueError("is not a whole number")
    return int(number)


def _parse_float(text: str, problem: str) -> float:
    digits = text.replace(",", "") if _GROUPED_DIGITS.fullmatch(text) else text
    try:
        return float(digits)
    except ValueError:
        raise ValueError(problem) from None


def _is_finite(number: int | float) -> bool:
    """Whether a number is finite and not larger than a float can be."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _is_plain(text: str) -> bool:
    """Whether a text can stand in a line as it is."""
    return bool(text) and text == text.strip() and text.isprintable() and not text.startswith('"')


def _is_json(text: str) -> bool:
    try:
        read_json(text)
    except ValueError:
        return False
    return True


def _unquote(text: str) -> str:
    """The text between quotation marks, or the text itself."""
    if text.startswith('"'):
        try:
            value = read_json(text)
        except ValueError:
            return text
        return str(value)
    return text


def _is_same(one: Any, other: Any) -> bool:
    """Equality of JSON values: true is not 1, and 1.0 is 1."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; empty mappings and lists are values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= {path: value} | flatten(value, f"{path}.")
        else:
            flat[path] = value
    return flat
