"""Strict JSON: no duplicate keys, no bare NaN or infinity; and a check for lone surrogates.

`json.loads` keeps the last of two equal keys, so two parsers can read one document differently. `json.dumps` writes
bare NaN and Infinity, which most other parsers refuse; here they are the strings "NaN", "Infinity" and "-Infinity", in
journals, run directories, the HTTP API and `--json`. Readers accept both.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for the json module that raises `ValueError` for a duplicate key."""
    document = dict(pairs)
    if len(document) != len(pairs):
        duplicate = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {duplicate[:100]!r} is given twice")
    return document


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:20]} is not a JSON number")


def _parse_finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse_number(text)


# Python reads NaN and turns 1e999 into infinity; neither could be written as JSON again.
_DECODER = json.JSONDecoder(
    object_pairs_hook=reject_duplicate_keys, parse_constant=_refuse_number, parse_float=_parse_finite
)


def read_json(text: str | bytes) -> Any:
    """Parse a JSON document (bytes: UTF-8); `ValueError` with the reason if it is ambiguous or not JSON."""
    try:
        return _DECODER.decode(text.decode("utf-8") if isinstance(text, bytes) else text)
    except UnicodeDecodeError as error:
        # The text of UnicodeDecodeError quotes the whole input.
        raise ValueError(f"it is not UTF-8 ({error.reason} at byte {error.start})") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def find_lone_surrogate(value: Any) -> str | None:
    """The first string in a JSON value with a lone surrogate (not valid in UTF-8), or None."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return value
    elif isinstance(value, Mapping):
        return next(filter(None, map(find_lone_surrogate, (*value.keys(), *value.values()))), None)
    elif isinstance(value, list | tuple):
        return next(filter(None, map(find_lone_surrogate, value)), None)
    return None


def json_number(value: float) -> float | str:
    """The number, or its name if JSON has no literal for it."""
    # float() first: numpy scalars have a repr that is not JSON.
    value = float(value)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def read_number(value: Any) -> float:
    """The number of a JSON value; `ValueError` if it is not a number."""
    if type(value) is float:
        return value
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ValueError("a number beyond the range of a float") from None
    if type(value) is str and value in _NON_FINITE:
        return _NON_FINITE[value]
    raise ValueError(f"{_shorten(value)} is not a number")


def optional_number(value: Any) -> float | None:
    """The number of a JSON value, or None."""
    try:
        return read_number(value)
    except ValueError:
        return None


def read_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among named JSON values."""
    return {name: number for name, value in values.items() if (number := optional_number(value)) is not None}


def replace_non_finite(value: Any) -> Any:
    """Nested data with NaN and infinities replaced by their names."""
    if isinstance(value, float):
        return json_number(value)
    if isinstance(value, Mapping):
        return {str(key): replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(item) for item in value]
    return value


def dump_json(data: Any, **options: Any) -> str:
    """`json.dumps` of data that may hold non-finite numbers, as strict JSON."""
    try:
        return json.dumps(data, allow_nan=False, **options)
    except ValueError:
        return json.dumps(replace_non_finite(data), allow_nan=False, **options)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
