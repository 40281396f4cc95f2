"""JSON from outside, read strictly: no key twice, no NaN or infinity; and text that UTF-8 cannot carry is found.

`json.loads` keeps the last of two equal keys, so two readers of one document can disagree about what it says.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

__all__ = ["lone_surrogate", "read_json", "unique_keys"]


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs; `ValueError` for a key given twice. An `object_pairs_hook` of the json module."""
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
    """The value of a JSON document (bytes: in UTF-8); `ValueError` with the reason when it is ambiguous or not JSON."""
    try:
        return _DECODER.decode(text.decode("utf-8") if isinstance(text, bytes) else text)
    except UnicodeDecodeError as error:
        # Its own text would quote all that was read.
        raise ValueError(f"it is not UTF-8 ({error.reason} at byte {error.start})") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def lone_surrogate(value: Any) -> str | None:
    """The first text in a JSON value that holds half of a surrogate pair; None when every text can be stored."""
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
