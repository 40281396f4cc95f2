"""Decoding replies: the result types, arguments checked against a table, and strict JSON.

Decoders raise `DecodeError`, which `ActionCodec.decode` turns into `UnreadableReply`. A grammar is a table from action
names to their arguments; a name that is not in the table is rejected with the nearest match.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from palaestra.config import closest_names
from palaestra.sessions.action import UiAction

SEVERAL = "the reply has several actions; one per step is allowed"


@dataclass(frozen=True)
class DecodedAction:
    """A reply that contains exactly one action."""

    action: UiAction
    thought: str = ""
    """The text around the action."""
    span: tuple[int, int] = (0, 0)
    """Start and end of the action's text in the reply."""


@dataclass(frozen=True)
class UnreadableReply:
    """A reply with no action, several, or one that cannot be performed."""

    code: str
    """One word to count by; `docs/codecs.md` lists them."""
    reason: str
    """A sentence to show."""


DecodeResult: TypeAlias = DecodedAction | UnreadableReply


class DecodeError(Exception):
    """The reply cannot be decoded."""

    def __init__(self, code: str, reason: str) -> None:
        self.code, self.reason = code, reason
        super().__init__(f"{code}: {reason}")


def abbreviate(value: object) -> str:
    """The `repr` of a value, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True)
class ArgumentSpec:
    """The arguments that one action of a grammar takes."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


class Arguments:
    """The arguments of one action: all of them known, all required ones present."""

    def __init__(self, word: str, given: Mapping[str, Any], spec: ArgumentSpec) -> None:
        known = (*spec.required, *spec.optional)
        for name in given:
            if name not in known:
                raise DecodeError("unknown_argument", f"{word} takes no {abbreviate(name)}. {_suggest(name, known)}")
        # An optional argument may be written out as null.
        self._given = {name: value for name, value in given.items() if value is not None}
        for name in spec.required:
            if name not in self._given:
                raise DecodeError("missing_argument", f"{word} needs {name}")
        self.word = word

    @classmethod
    def of(
        cls, word: object, given: Mapping[str, Any], specs: Mapping[str, ArgumentSpec], unsupported: Mapping[str, str]
    ) -> Arguments:
        """Check the action's name against the grammar, then its arguments."""
        if not isinstance(word, str):
            raise DecodeError("unknown_action", f"the action's name is {abbreviate(word)}, not a text")
        if word in unsupported:
            raise DecodeError("unsupported", f"{word}: {unsupported[word]}")
        if word not in specs:
            raise DecodeError("unknown_action", f"{abbreviate(word)} is not an action. {_suggest(word, specs)}")
        return cls(word, given, specs[word])

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def text(self, name: str) -> str:
        """A text that can be stored as UTF-8."""
        value = self._given[name]
        if not isinstance(value, str):
            raise self._error(name, "is not a text")
        if any(0xD800 <= ord(character) <= 0xDFFF for character in value):
            raise self._error(name, "contains half of a surrogate pair")
        return value

    def choice(self, name: str, choices: Iterable[str]) -> str:
        """One of the given words."""
        value, choices = self._given[name], list(choices)
        if not isinstance(value, str) or value not in choices:
            raise self._error(name, f"is none of {', '.join(choices)}")
        return value

    def words(self, name: str) -> list[str]:
        """A list of texts."""
        value = self._given[name]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._error(name, "is not a list of texts")
        return value

    def number(self, name: str) -> float:
        """A finite number; neither a text nor a boolean counts."""
        return self._number(name, self._given[name])

    def whole(self, name: str) -> int:
        """A whole number."""
        value = self._given[name]
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._error(name, "is not a whole number")
        return value

    def pair(self, name: str, *, whole: bool = False) -> tuple[float, float]:
        """A list of two numbers."""
        value = self._given[name]
        if not isinstance(value, list) or len(value) != 2:
            raise self._error(name, "is not a pair [x, y]")
        x, y = (self._number(name, number) for number in value)
        if whole and not (isinstance(x, int) and isinstance(y, int)):
            raise self._error(name, "is not in whole pixels")
        return x, y

    def objects(self, name: str, spec: ArgumentSpec) -> list[Arguments]:
        """A list of objects that follow one specification."""
        value = self._given[name]
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self._error(name, "is not a list of objects")
        return [Arguments(f"{self.word}.{name}", item, spec) for item in value]

    def _number(self, name: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._error(name, "is not a number")
        if isinstance(value, float) and not math.isfinite(value):
            raise self._error(name, "is not finite")
        return value

    def _error(self, name: str, reason: str) -> DecodeError:
        return DecodeError("bad_argument", f"{self.word}.{name} = {abbreviate(self._given[name])} {reason}")


def _suggest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    # The cost of comparing grows with the length, and no name is that long.
    close = closest_names(name, known, count=1) if len(name) <= 80 else []
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known) or 'none'}"


def parse_json_object(text: str, start: int) -> tuple[dict[str, Any], int]:
    """Parse the JSON object at `start` (whitespace before it is skipped); also returns its end."""
    value, end = _parse_json(text, start)
    if not isinstance(value, dict):
        raise DecodeError("syntax", f"the action is {abbreviate(value)}, not a JSON object")
    return value, end


def parse_single_json(text: str) -> tuple[Any, tuple[int, int]]:
    """Parse a text that consists of one JSON value; also returns the value's span."""
    start = _skip_whitespace(text, 0)
    if start == len(text):
        raise DecodeError("no_action", "the reply is empty")
    value, end = _parse_json(text, start)
    rest = _skip_whitespace(text, end)
    if text.startswith(("{", "["), rest):
        raise DecodeError("several", SEVERAL)
    if rest != len(text):
        raise DecodeError("syntax", f"something follows the JSON at character {rest}")
    return value, (start, end)


def dump_json(document: dict[str, Any]) -> str:
    """JSON as the families write it: one line, non-ASCII characters unescaped."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False)


def _parse_json(text: str, start: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, _skip_whitespace(text, start))
    except json.JSONDecodeError as error:
        raise DecodeError("syntax", f"not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError):
        # Integers of thousands of digits, and deeply nested lists.
        raise DecodeError("syntax", "JSON of a size or depth that no action has") from None


def _skip_whitespace(text: str, start: int) -> int:
    while start < len(text) and text[start] in " \t\r\n":
        start += 1
    return start


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise DecodeError("syntax", f"the key {abbreviate(twice)} is given twice")
    return document


def _parse_finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise DecodeError("syntax", f"the number {abbreviate(number)} is too large")
    return value


def _reject_constant(name: str) -> Any:
    raise DecodeError("syntax", f"{name} is not a number")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_reject_duplicate_keys, parse_float=_parse_finite, parse_constant=_reject_constant
)
