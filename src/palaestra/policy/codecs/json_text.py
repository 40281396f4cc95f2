"""JSON as a model writes it, read strictly: no duplicate key, no NaN, nothing that is not in the standard."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

from palaestra.policy.codecs.reading import Refusal, shown

__all__ = ["object_at", "sole_value", "written"]

BLANKS = " \t\r\n"


def object_at(text: str, start: int) -> tuple[dict[str, Any], int]:
    """The JSON object that begins at or after `start` with only blanks between, and where it ends."""
    value, end = _value_at(text, start)
    if not isinstance(value, dict):
        raise Refusal("syntax", f"the action is {shown(value)}, not a JSON object")
    return value, end


def sole_value(text: str) -> tuple[Any, tuple[int, int]]:
    """The one JSON value a text consists of, and where it stands."""
    start = _after_blanks(text, 0)
    if start == len(text):
        raise Refusal("no_action", "the answer is empty")
    value, end = _value_at(text, start)
    rest = _after_blanks(text, end)
    if text.startswith(("{", "["), rest):
        raise Refusal("several", "the answer says several actions; one is taken a step")
    if rest != len(text):
        raise Refusal("syntax", f"something follows the JSON at character {rest}")
    return value, (start, end)


def written(document: dict[str, Any]) -> str:
    """A document as families write it: one line, characters as they are."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False)


def _value_at(text: str, start: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, _after_blanks(text, start))
    except json.JSONDecodeError as error:
        raise Refusal("syntax", f"not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError):
        # Whole numbers of thousands of digits, and lists within lists within lists.
        raise Refusal("syntax", "JSON of a size or depth that no action has") from None


def _after_blanks(text: str, start: int) -> int:
    while start < len(text) and text[start] in BLANKS:
        start += 1
    return start


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise Refusal("syntax", f"the key {shown(twice)} is given twice")
    return document


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise Refusal("syntax", f"the number {shown(number)} is too large")
    return value


def _no_constant(name: str) -> Any:
    raise Refusal("syntax", f"{name} is not a number")


_DECODER = json.JSONDecoder(object_pairs_hook=_distinct, parse_float=_finite, parse_constant=_no_constant)
