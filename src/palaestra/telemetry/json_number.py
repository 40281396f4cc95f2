"""How numbers that JSON has no literal for are written: as the strings "NaN", "Infinity" and "-Infinity".

One convention for everything that is strict JSON: journals, run directories, the HTTP API, `--json`. Python's own
`json.dumps` writes them bare, which most other parsers refuse; readers here accept both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["dump_strict", "finite_tree", "json_number", "optional_number", "read_number", "read_numbers"]

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def json_number(value: float) -> float | str:
    """The number, or its name when JSON has no literal for it."""
    # float() first: numpy scalars have a repr that is not JSON.
    value = float(value)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def read_number(value: Any) -> float:
    """The number that a JSON value stands for; `ValueError` when it is none."""
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
    """The number that a JSON value stands for, or None."""
    try:
        return read_number(value)
    except ValueError:
        return None


def read_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among named JSON values."""
    return {name: number for name, value in values.items() if (number := optional_number(value)) is not None}


def finite_tree(value: Any) -> Any:
    """Nested data with every number written as `json_number` writes it."""
    if isinstance(value, float):
        return json_number(value)
    if isinstance(value, Mapping):
        return {str(key): finite_tree(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_tree(item) for item in value]
    return value


def dump_strict(data: Any, **options: Any) -> str:
    """`json.dumps` of data that may hold non-finite numbers, as strict JSON."""
    try:
        return json.dumps(data, allow_nan=False, **options)
    except ValueError:
        return json.dumps(finite_tree(data), allow_nan=False, **options)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
