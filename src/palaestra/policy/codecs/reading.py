"""What all codecs share while they read: how a refusal travels to the top, and how arguments are taken.

`Refusal` never leaves the package: `read_answer` turns it into `Unreadable`. A grammar is a table from words to the
arguments they take; anything not in the table is refused with the nearest name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from palaestra.config import nearest
from palaestra.errors import InvalidAction
from palaestra.policy.codecs.codec import Decoded, Understood, Unreadable

__all__ = ["MAX_ANSWER", "Arguments", "Refusal", "Shape", "read_answer", "shown"]

MAX_ANSWER = 200_000
"""Characters; the longest text an action may type fits even when each of its characters is escaped."""


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
    close = nearest(name, known, count=1) if len(name) <= 80 else []
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known) or 'none'}"
