"""Dataclasses and errors as JSON data and back, for the HTTP API, the client, the registry and `--json`.

`to_json` and `from_json` work from the type annotations of a dataclass, and FastAPI builds its response schema from the
same annotations: a new field of a record needs no other change here. Readers ignore keys that they do not know, so an
earlier version can read the data of a later one. NaN and infinities are strings, as in `strict_json`.

Imports neither pydantic nor FastAPI.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from enum import Enum
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from palaestra.errors import (
    ConfigError,
    ConsentRequired,
    IllegalTransition,
    LaunchRefused,
    PalaestraError,
    ServiceUnreachable,
    StateDirectoryLocked,
    UnknownRun,
)
from palaestra.redaction import Redactor
from palaestra.strict_json import json_number, optional_number, read_number, read_numbers

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

_T = TypeVar("_T")
JsonObject: TypeAlias = dict[str, Any]

API_SCHEMA = {"use_attribute_docstrings": True, "json_schema_serialization_defaults_required": True}
"""`__pydantic_config__` of the dataclasses that are responses of the HTTP API: attribute docstrings become the
descriptions of the fields, and fields with a default are always present."""

_ERROR_CODES: dict[type[PalaestraError], str] = {
    LaunchRefused: "refused",
    UnknownRun: "unknown_run",
    StateDirectoryLocked: "state_held",
    ConfigError: "bad_request",
    ConsentRequired: "consent_needed",
    IllegalTransition: "illegal_transition",
    ServiceUnreachable: "unreachable",
}
_MAX_VALUE_CHARACTERS = 1000
_RENAMED_KEYS = {
    "happening": "kind",  # of an event
    "warden_lives": "watchdog_alive",
    "warden": "watchdog",  # of process.json and a row
    "film": "record_video",  # of plan.json
    "grammar": "format",
    "given": "config_text",  # of spec.json
    "said": "reported_phase",  # of commits.log
}
_RENAMED_VALUES = {"code": {"warden_gone": "watchdog_gone"}, "stall_action": {"tell": "alarm"}}


class _JsonNumber:
    """Tells pydantic how `to_json` writes a float."""

    @staticmethod
    def __get_pydantic_core_schema__(source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(float | Literal["NaN", "Infinity", "-Infinity"])


Number = Annotated[float, _JsonNumber]
"""A float that may be NaN or infinite, which JSON has no literals for."""


@overload
def to_json(value: DataclassInstance) -> JsonObject: ...
@overload
def to_json(value: Any) -> Any: ...
def to_json(value: Any) -> Any:
    """A dataclass, or nested data that may hold some, as strict JSON data."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float):
        return json_number(value)
    if isinstance(value, Mapping):
        return {to_json(str(key)): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def from_json(kind: type[_T], data: Mapping[str, Any]) -> _T:
    """A dataclass from its JSON data."""
    readers = _readers.get(kind)
    if readers is None:
        readers = _readers[kind] = {name: _reader(annotation) for name, annotation in field_types(kind).items()}
    known = {name: value for name, value in data.items() if name in readers}
    for name, read in readers.items():
        if read is not None and name in known:
            known[name] = read(known[name])
    return kind(**known)


def from_damaged_json(kind: type[_T], data: Mapping[str, object]) -> _T:
    """A flat dataclass with a default for every field, from data that may be damaged: wrong types are left out."""
    types = field_types(kind)
    return kind(**{name: value for name, value in data.items() if name in types and _fits(value, types[name])})


def _fits(value: object, kind: Any) -> bool:
    # An integer is a valid float.
    return isinstance(value, kind) or (type(value) is int and isinstance(0.0, kind))


def field_types(kind: type[Any]) -> dict[str, Any]:
    """The annotations of a dataclass's fields, in their order."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


_readers: dict[Any, dict[str, Callable[[Any], Any] | None]] = {}
"""Converters of every dataclass that was read, by field."""


def _reader(kind: Any) -> Callable[[Any], Any] | None:
    """Converts a JSON value to an annotated type; None when the JSON value is used as it is."""
    if kind == Number:
        return read_number
    if kind == Number | None:
        return optional_number
    if kind == dict[str, Number]:
        return lambda values: read_numbers(values or {})
    arguments = get_args(kind)
    if NoneType in arguments:
        item = next(argument for argument in arguments if argument is not NoneType)
        read = getattr(item, "from_json", None) or _reader(item)
        return read and (lambda value: None if value is None else read(value))
    if get_origin(kind) is list:
        read_one = _reader(arguments[0])
        return read_one and (lambda values: [read_one(value) for value in values])
    if get_origin(kind) is dict:
        read_value = _reader(arguments[1])
        return read_value and (lambda values: {name: read_value(value) for name, value in values.items()})
    if get_origin(kind) is tuple:
        read_item = _reader(arguments[0])
        return lambda values: tuple(values or ()) if read_item is None else tuple(map(read_item, values or ()))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return functools.partial(from_json, kind)
    return None


def upgrade_names(document: JsonObject) -> JsonObject:
    """Stored data of a run in which the names of earlier versions are replaced by the current ones, at the top level.

    Ended runs and archives are never rewritten, a watchdog outlives the service that started it, and a service of the
    earlier version may still be running beside this process: readers accept both.
    """
    renamed = {_RENAMED_KEYS.get(key, key): value for key, value in document.items()}
    for key, values in _RENAMED_VALUES.items():
        value = renamed.get(key)
        if isinstance(value, str):
            renamed[key] = values.get(value, value)
    return renamed


def error_to_json(error: PalaestraError) -> JsonObject:
    """An error as JSON data, with secrets redacted."""
    redact = Redactor()
    code = next((code for kind, code in _ERROR_CODES.items() if isinstance(error, kind)), "failed")
    data: JsonObject = {"code": code, "text": redact(str(error)), "place": "", "reason": "", "remedy": ""}
    if isinstance(error, ConfigError):
        data |= {"place": error.place, "reason": redact(error.reason), "remedy": redact(error.remedy)}
        value = redact(json.dumps(to_json(error.value), default=str))
        # A shortened or redacted value may no longer be JSON, and is sent as text.
        is_intact = len(value) <= _MAX_VALUE_CHARACTERS and "***" not in value
        data["value"] = json.loads(value) if is_intact else value[:_MAX_VALUE_CHARACTERS]
    if isinstance(error, ConsentRequired):
        data["digest"] = error.digest
    return data


def error_from_json(data: Mapping[str, Any]) -> PalaestraError:
    """The error that `error_to_json` wrote."""
    text, code = str(data.get("text", "")), data.get("code")
    kind = next((kind for kind, known in _ERROR_CODES.items() if known == code), PalaestraError)
    if issubclass(kind, ConfigError):
        return kind(
            str(data.get("place", "")), data.get("value"), str(data.get("reason", "")), str(data.get("remedy", ""))
        )
    if issubclass(kind, ConsentRequired):
        return ConsentRequired(text, str(data.get("digest", "")))
    return kind(text)
