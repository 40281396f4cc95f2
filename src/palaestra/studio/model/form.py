"""Forms made from the JSON Schema of a runner: fields in groups, with units, defaults, ranges and messages.

A form holds texts, as the user types them, and only the values that differ from their defaults. What it cannot show as
a simple field (free mappings, lists of objects) is one field of JSON text, so that everything can be entered.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from palaestra.studio.model.commands import match_score
from palaestra.studio.model.revision import Revised

Kind: TypeAlias = Literal["flag", "integer", "number", "text", "choice", "json"]
GENERAL = "general"
_UNITS = {"_s": "s", "_seconds": "s", "_ms": "ms", "_mb": "MB", "_bytes": "bytes", "_steps": "steps"}
_MAX_DEPTH = 3


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

    @property
    def range_text(self) -> str:
        """The range in words; empty without one."""
        low = (
            f"above {self.above:g}"
            if self.above is not None
            else f"from {self.minimum:g}"
            if self.minimum is not None
            else ""
        )
        high = (
            f"below {self.below:g}"
            if self.below is not None
            else f"up to {self.maximum:g}"
            if self.maximum is not None
            else ""
        )
        return " ".join(part for part in (low, high) if part)

    def format(self, value: Any) -> str:
        """A value as the user would type it."""
        if value is UNSET or value is None:
            return ""
        if self.kind in ("text", "choice") and isinstance(value, str):
            return value
        if isinstance(value, float):
            return repr(value) if abs(value) >= 1e-4 or value == 0 else f"{value:g}"
        return json.dumps(value)

    def parse(self, text: str) -> Any:
        """The value of a text; `ValueError` with the reason if it is none. An empty text is the default."""
        text = text.strip()
        if not text:
            if self.is_required:
                raise ValueError("is required")
            return UNSET
        if text in ("null", "none", "None") and self.can_be_empty:
            return None
        return self._check_range(self._parse_kind(text))

    def _parse_kind(self, text: str) -> Any:
        if self.kind == "flag":
            if text.lower() not in ("true", "false"):
                raise ValueError("is neither true nor false")
            return text.lower() == "true"
        if self.kind == "integer":
            try:
                number = float(text.replace("_", "").replace(",", ""))
            except ValueError:
                raise ValueError("is not a whole number") from None
            if not number.is_integer():
                raise ValueError("is not a whole number")
            return int(number)
        if self.kind == "number":
            try:
                return float(text.replace("_", "").replace(",", ""))
            except ValueError:
                raise ValueError("is not a number") from None
        if self.kind == "choice":
            match = next((choice for choice in self.choices if self.format(choice) == text), UNSET)
            if match is UNSET:
                raise ValueError(f"is none of {', '.join(self.format(choice) for choice in self.choices)}")
            return match
        if self.kind == "json":
            try:
                return json.loads(text)
            except ValueError as error:
                raise ValueError(f"is not JSON ({error})") from None
        return text

    def _check_range(self, value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            is_low = (self.minimum is not None and value < self.minimum) or (
                self.above is not None and value <= self.above
            )
            is_high = (self.maximum is not None and value > self.maximum) or (
                self.below is not None and value >= self.below
            )
            if is_low or is_high or not math.isfinite(value):
                raise ValueError(f"must lie {self.range_text}" if self.range_text else "is not a finite number")
        return value


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
        found = fields_of(schema)
        self.fields = {one.path: one for one in found if one.path not in hidden}
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

    def set_value(self, path: str, value: Any) -> None:
        """Enter a value."""
        one = self.fields.get(path)
        self.set_text(path, one.format(value) if one is not None else json.dumps(value))

    def clear(self) -> None:
        """Return to the defaults."""
        if self._texts or self._remarks:
            self._texts.clear()
            self._remarks.clear()
            self.touch()

    def load(self, values: Mapping[str, Any]) -> None:
        """Enter the values of a preset or of another run; keys that the schema does not have are left out."""
        self._texts = {}
        for path, value in flatten(values).items():
            one = self.fields.get(path)
            if one is not None and value != one.default:
                self._texts[path] = one.format(value)
        self.touch()

    def value(self, path: str) -> Any:
        """The value of a field: what was entered, else the default. `ValueError` if the text is invalid."""
        one = self.fields[path]
        entered = one.parse(self.text(path)) if self.text(path) else UNSET
        return one.default if entered is UNSET else entered

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

    def add_remark(self, path: str, text: str) -> bool:
        """Show a message of the service beside a field, until its text changes; whether there is such a field."""
        if path not in self.fields:
            return False
        self._remarks[path] = text
        self.touch()
        return True

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
            if value is not UNSET and value != one.default:
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
    """The fields of a JSON Schema; nested objects become dotted keys."""
    definitions = schema.get("$defs") or schema.get("definitions") or {}
    return list(_iterate(schema, definitions, (), set(schema.get("required") or ()), {}))


def _iterate(
    schema: Mapping[str, Any],
    definitions: Mapping[str, Any],
    path: tuple[str, ...],
    required: set[str],
    defaults: Mapping[str, Any],
) -> Iterator[FormField]:
    for name, raw in (schema.get("properties") or {}).items():
        part, can_be_empty = _resolve(raw, definitions)
        here = (*path, name)
        default = defaults.get(name, part.get("default", UNSET))
        if part.get("properties") and len(here) < _MAX_DEPTH and not can_be_empty:
            inner = default if isinstance(default, Mapping) else {}
            yield from _iterate(part, definitions, here, set(part.get("required") or ()), inner)
            continue
        yield _field(name, here, part, default, can_be_empty=can_be_empty, is_required=name in required)


def _field(
    name: str, path: tuple[str, ...], part: Mapping[str, Any], default: Any, *, can_be_empty: bool, is_required: bool
) -> FormField:
    kind, choices = _kind(part)
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
    )


def _resolve(part: Mapping[str, Any], definitions: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """A schema without references and without null; and whether null is allowed."""
    can_be_empty = False
    for _ in range(8):
        if "$ref" in part:
            target = definitions.get(str(part["$ref"]).rpartition("/")[2], {})
            part = {**target, **{key: value for key, value in part.items() if key != "$ref"}}
        elif len(part.get("allOf") or ()) == 1:
            part = {**part["allOf"][0], **{key: value for key, value in part.items() if key != "allOf"}}
        elif "anyOf" in part or "oneOf" in part:
            options = [one for one in part.get("anyOf") or part["oneOf"] if one.get("type") != "null"]
            can_be_empty = can_be_empty or len(options) < len(part.get("anyOf") or part["oneOf"])
            rest = {key: value for key, value in part.items() if key not in ("anyOf", "oneOf")}
            if len(options) != 1:
                return {**rest, "type": "any"}, can_be_empty
            part = {**options[0], **rest}
        elif isinstance(part.get("type"), list):
            types = [one for one in part["type"] if one != "null"]
            can_be_empty = can_be_empty or len(types) < len(part["type"])
            part = {**part, "type": types[0] if len(types) == 1 else "any"}
        else:
            break
    return part, can_be_empty


def _kind(part: Mapping[str, Any]) -> tuple[Kind, tuple[Any, ...]]:
    if "const" in part:
        return "choice", (part["const"],)
    if part.get("enum"):
        return "choice", tuple(part["enum"])
    kinds: dict[str, Kind] = {"boolean": "flag", "integer": "integer", "number": "number", "string": "text"}
    kind = kinds.get(str(part.get("type", "")), "json")
    return kind, (True, False) if kind == "flag" else ()


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


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
