"""Strict parsing of JSON from outside: no duplicate keys, no NaN or infinity; and a check for lone surrogates.

`json.loads` keeps the last of two equal keys, so two parsers can read one document differently.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

__all__ = ["lone_surrogate", "read_json", "unique_keys"]


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for the json module that raises `ValueError` for a duplicate key."""
    document = dict(pairs)
    if len(document) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice[:100]!r} is given twice")
    return document


def _not_a_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:20]} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _not_a_number(text)


# Python reads NaN and turns 1e999 into infinity; neither could be written into a document again.
_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys, parse_constant=_not_a_number, parse_float=_finite)


def read_json(text: str | bytes) -> Any:
    """Parse a JSON document (bytes: UTF-8); `ValueError` with the reason when it is ambiguous or not JSON."""
    try:
        return _DECODER.decode(text.decode("utf-8") if isinstance(text, bytes) else text)
    except UnicodeDecodeError as error:
        # Its own text would quote all that was read.
        raise ValueError(f"it is not UTF-8 ({error.reason} at byte {error.start})") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def lone_surrogate(value: Any) -> str | None:
    """The first text in a JSON value that holds half of a surrogate pair (not valid in UTF-8); None without one."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return value
    elif isinstance(value, Mapping):
        return next(filter(None, map(lone_surrogate, (*value.keys(), *value.values()))), None)
    elif isinstance(value, list | tuple):
        return next(filter(None, map(lone_surrogate, value)), None)
    return None
