"""What all codecs share while they read: how a refusal travels to the top, and how arguments are taken.

`Refusal` never leaves the package: `read_answer` turns it into `Unreadable`. A grammar is a table from words to the
arguments they take; anything not in the table is refused with the nearest name.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from palaestra.config import closest_names
from palaestra.errors import InvalidAction
from palaestra.sessions.action import UiAction

__all__ = [
    "MAX_ANSWER",
    "Arguments",
    "Decoded",
    "Refusal",
    "Shape",
    "Understood",
    "Unreadable",
    "object_at",
    "read_answer",
    "shown",
    "sole_value",
    "written",
]


MAX_ANSWER = 200_000
"""Characters; the longest text an action may type fits even when each of its characters is escaped."""


@dataclass(frozen=True)
class Understood:
    """An answer that says exactly one action."""

    action: UiAction
    thought: str = ""
    """What was said around the action."""
    span: tuple[int, int] = (0, 0)
    """Where the action's text starts and ends in the answer."""


@dataclass(frozen=True)
class Unreadable:
    """An answer that says no action, several, or one that cannot be performed."""

    code: str
    """One word to count by; `docs/codecs.md` lists them."""
    reason: str
    """A sentence to show."""


Decoded: TypeAlias = Understood | Unreadable


class Refusal(Exception):
    """The answer cannot be read, for this reason."""

    def __init__(self, code: str, reason: str) -> None:
        self.code, self.reason = code, reason
        super().__init__(f"{code}: {reason}")


def read_answer(text: str, read: Callable[[], Understood]) -> Decoded:
    """What `read` makes of `text`, every refusal turned into `Unreadable`."""
    if len(text) > MAX_ANSWER:
        return Unreadable("too_long", f"the answer has {len(text)} characters; at most {MAX_ANSWER} are read")
    try:
        return read()
    except Refusal as refusal:
        return Unreadable(refusal.code, refusal.reason)
    except InvalidAction as error:
        return Unreadable("invalid", str(error))
    except RecursionError:
        return Unreadable("syntax", "lists within lists, deeper than any action")


def shown(value: object) -> str:
    """A value as a reason quotes it: never more than a line."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True)
class Shape:
    """The arguments one word of a grammar takes."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


class Arguments:
    """The arguments of one word, every one of them known and the required ones given."""

    def __init__(self, word: str, given: Mapping[str, Any], shape: Shape) -> None:
        known = (*shape.required, *shape.optional)
        for name in given:
            if name not in known:
                raise Refusal("unknown_argument", f"{word} takes no {shown(name)}. {_hint(name, known)}")
        # An optional argument may be written out as null.
        self._given = {name: value for name, value in given.items() if value is not None}
        for name in shape.required:
            if name not in self._given:
                raise Refusal("missing_argument", f"{word} needs {name}")
        self.word = word

    @classmethod
    def of(
        cls, word: object, given: Mapping[str, Any], shapes: Mapping[str, Shape], unsupported: Mapping[str, str]
    ) -> Arguments:
        """The arguments of a word that a grammar knows."""
        if not isinstance(word, str):
            raise Refusal("unknown_action", f"the action's name is {shown(word)}, not a text")
        if word in unsupported:
            raise Refusal("unsupported", f"{word}: {unsupported[word]}")
        if word not in shapes:
            raise Refusal("unknown_action", f"{shown(word)} is no action. {_hint(word, shapes)}")
        return cls(word, given, shapes[word])

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def text(self, name: str) -> str:
        """A text that can be stored as UTF-8."""
        value = self._given[name]
        if not isinstance(value, str):
            raise self._refused(name, "is not a text")
        if any(0xD800 <= ord(character) <= 0xDFFF for character in value):
            raise self._refused(name, "contains half a character")
        return value

    def choice(self, name: str, choices: Iterable[str]) -> str:
        """One of a few words."""
        value, choices = self._given[name], list(choices)
        if not isinstance(value, str) or value not in choices:
            raise self._refused(name, f"is none of {', '.join(choices)}")
        return value

    def words(self, name: str) -> list[str]:
        """A list of texts."""
        value = self._given[name]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._refused(name, "is not a list of texts")
        return value

    def number(self, name: str) -> float:
        """A finite number; neither a text nor a truth value is one."""
        return self._number(name, self._given[name])

    def whole(self, name: str) -> int:
        """A whole number."""
        value = self._given[name]
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._refused(name, "is not a whole number")
        return value

    def pair(self, name: str, *, whole: bool = False) -> tuple[float, float]:
        """A list of two numbers."""
        value = self._given[name]
        if not isinstance(value, list) or len(value) != 2:
            raise self._refused(name, "is not a pair [x, y]")
        x, y = (self._number(name, number) for number in value)
        if whole and not (isinstance(x, int) and isinstance(y, int)):
            raise self._refused(name, "is not in whole pixels")
        return x, y

    def objects(self, name: str, shape: Shape) -> list[Arguments]:
        """A list of objects of one shape."""
        value = self._given[name]
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self._refused(name, "is not a list of objects")
        return [Arguments(f"{self.word}.{name}", item, shape) for item in value]

    def _number(self, name: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._refused(name, "is not a number")
        if isinstance(value, float) and not math.isfinite(value):
            raise self._refused(name, "is not finite")
        return value

    def _refused(self, name: str, reason: str) -> Refusal:
        return Refusal("bad_argument", f"{self.word}.{name} = {shown(self._given[name])} {reason}")


def _hint(name: str, known: Iterable[str]) -> str:
    known = list(known)
    # Comparing takes time that grows with the length, and no name is that long.
    close = closest_names(name, known, count=1) if len(name) <= 80 else []
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known) or 'none'}"


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
