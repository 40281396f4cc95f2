"""Base class of all configuration sections: frozen and typed, and unknown keys are refused with the closest known name.

A section is a pydantic model next to the code that it configures. `parse_section` is the only way in for outside data;
it turns pydantic's validation errors into `ConfigError` (place, value, reason, remedy).
"""

from __future__ import annotations

import difflib
import os
import sys
import typing
from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from palaestra.errors import ConfigError
from palaestra.strict_json import find_lone_surrogate


class Section(BaseModel):
    """One section of a configuration. Attribute docstrings become the documentation of the keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        # True equals 1 in Python, so `num_envs: true` would silently train in one environment.
        if _has_boolean(value) and info.field_name is not None:
            annotation = cls.model_fields[info.field_name].annotation
            if not _accepts_booleans(annotation):
                raise ValueError("is true or false, which this key does not accept")
        return value


def _has_boolean(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, list | tuple) and any(_has_boolean(part) for part in value))


def _accepts_booleans(annotation: Any) -> bool:
    """Whether a field accepts true and false."""
    if annotation in (bool, Any, object) or isinstance(annotation, bool | TypeVar):
        return True
    return any(_accepts_booleans(part) for part in typing.get_args(annotation))


_SectionT = TypeVar("_SectionT", bound=Section)


def closest_names(name: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """The known names closest to `name`, best first; empty if none is close."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=0.5)


def suggest_name(name: str, known: Iterable[str], otherwise: str) -> str:
    """The remedy for an unknown name: the closest known one, or `otherwise` if none is close."""
    close = closest_names(name, known, count=1)
    return f"Did you mean {close[0]!r}?" if close else otherwise


def import_address(address: str, *, place: str) -> Any:
    """Import the object at the address `package.module:Name`; `ConfigError` about `place` if that fails."""
    module, _, attribute = address.partition(":")
    try:
        return getattr(import_own_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(place, address, f"cannot be imported ({error})", "Check the address") from None


def import_own_module(name: str) -> ModuleType:
    """Import a module that a configuration names: an installed one, or a file of the current directory.

    The `palaestra` command does not have the current directory on `sys.path`, as `python` has. It is added at the end
    when the module is not found otherwise, so that a file there never replaces an installed package; processes that are
    started later find the module as well.
    """
    if not name or name.startswith("."):  # `import_module` raises ValueError and TypeError for these
        raise ModuleNotFoundError(f"{name!r} is not the full name of a module", name=name)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0] or os.getcwd() in sys.path:
            raise
    sys.path.append(os.getcwd())
    return import_module(name)


def parse_section(
    section: type[_SectionT], data: Mapping[str, Any], *, place: str = "", other_keys: Collection[str] = ()
) -> _SectionT:
    """Build a section from data; `ConfigError` for the first error in it.

    `other_keys`: keys that may stand beside those of the section and were removed from the data, for suggestions.
    """
    if (surrogate := _find_lone_surrogate(data, place)) is not None:
        reason = "has half of a surrogate pair, which UTF-8 cannot encode"
        raise ConfigError(surrogate[0] or "configuration", surrogate[1], reason, "Write the whole character")
    try:
        return section.model_validate(dict(data))
    except ValidationError as error:
        raise _config_error(section, error, place, other_keys) from None


def _find_lone_surrogate(value: Any, place: str) -> tuple[str, str] | None:
    """Key and text of the first lone surrogate in a configuration, or None."""
    if isinstance(value, Mapping):
        if (key := find_lone_surrogate(list(value))) is not None:
            return place, key
        parts: Iterable[tuple[str, Any]] = ((f"{place}.{key}".lstrip("."), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        parts = ((f"{place}[{index}]", item) for index, item in enumerate(value))
    else:
        text = find_lone_surrogate(value)
        return None if text is None else (place, text)
    return next(filter(None, (_find_lone_surrogate(item, where) for where, item in parts)), None)


def _config_error(
    section: type[Section], error: ValidationError, place: str, other_keys: Collection[str]
) -> ConfigError:
    # An unknown key is reported first, because it explains most other errors (the right key is then missing).
    details = min(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
    path = [str(part) for part in details["loc"]]
    where = ".".join([part for part in (place, *path) if part])
    if details["type"] == "extra_forbidden":
        known = _known_keys(section, path[:-1]).union(other_keys if len(path) == 1 else ())
        remedy = suggest_name(path[-1], known, f"Known keys: {', '.join(sorted(known))}")
        return ConfigError(where, details["input"], "unknown key", remedy)
    if details["type"] == "missing":
        return ConfigError(where, None, "required and not given", f"Set {where}")
    if details["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return ConfigError(where, details["input"], "is not a mapping", f"Write {where}: {{key: value}}")
    if details["type"] in ("tuple_type", "list_type"):
        return ConfigError(where, details["input"], "is not a list", f"Write {where}=[{details['input']}]")
    if details["type"] == "value_error":
        # Our own message, which may start with a name.
        return ConfigError(where, details["input"], details["msg"].removeprefix("Value error, ").rstrip("."))
    reason = details["msg"].rstrip(".")
    return ConfigError(where, details["input"], reason[:1].lower() + reason[1:])


def _known_keys(section: type[BaseModel], path: list[str]) -> set[str]:
    model: type[BaseModel] = section
    for part in path:
        field = model.model_fields.get(part)
        if field is None:
            break
        candidates = [field.annotation, *typing.get_args(field.annotation)]
        inner = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not inner:
            break
        model = inner[0]
    return {field.alias or name for name, field in model.model_fields.items()}
