"""`UiAction`: everything an agent can do to a screen, as one sum type in screen pixels.

An action that could not be performed cannot be made: every class checks itself, and `fits` holds it against the size of
a screen. Actions are plain JSON on the wire (`encode`, `decode`); decoding refuses what it does not know instead of
guessing. No model's grammar is known here; codecs translate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

from palaestra.config import closest_names
from palaestra.errors import InvalidAction
from palaestra.sessions.keys import MODIFIERS, NAMED, known_key

__all__ = [
    "Answer",
    "Button",
    "Click",
    "Drag",
    "Move",
    "Point",
    "PressKeys",
    "Scroll",
    "Terminate",
    "TypeText",
    "UiAction",
    "Wait",
    "decode",
    "encode",
    "fits",
]

Button: TypeAlias = Literal["left", "middle", "right"]
MAX_TEXT, MAX_KEYS, MAX_PATH, MAX_WAIT_S, MAX_SCROLL = 10_000, 8, 256, 60.0, 100_000


class Point(NamedTuple):
    """A pixel of the screen, from its top left corner."""

    x: int
    y: int


@dataclass(frozen=True)
class Click:
    """Press and release a mouse button, `times` in quick succession, with keys `held` meanwhile."""

    kind: ClassVar[str] = "click"
    at: Point | None
    """None: where the pointer is."""
    button: Button = "left"
    times: int = 1
    held: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_button(self.button)
        if not _is_int(self.times) or not 1 <= self.times <= 3:
            raise InvalidAction("click.times", self.times, "must be 1, 2 or 3")
        for key in self.held:
            if not isinstance(key, str) or key not in MODIFIERS:
                raise InvalidAction("click.held", key, f"only {', '.join(MODIFIERS)} can be held")


@dataclass(frozen=True)
class Move:
    """Move the pointer."""

    kind: ClassVar[str] = "move"
    at: Point


@dataclass(frozen=True)
class Drag:
    """Press a button at the first point, move along the path, release it at the last."""

    kind: ClassVar[str] = "drag"
    path: tuple[Point, ...]
    button: Button = "left"

    def __post_init__(self) -> None:
        _check_button(self.button)
        if not 2 <= len(self.path) <= MAX_PATH:
            raise InvalidAction("drag.path", len(self.path), f"must have 2 to {MAX_PATH} points")


@dataclass(frozen=True)
class TypeText:
    """Type characters, any Unicode, into whatever has the focus; a newline is the Enter key, a tab the Tab key."""

    kind: ClassVar[str] = "type"
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not 1 <= len(self.text) <= MAX_TEXT:
            raise InvalidAction("type.text", self.text, f"must be a text of 1 to {MAX_TEXT} characters")
        for place, character in enumerate(self.text):
            if (ord(character) < 32 and character not in "\n\t") or _is_half(character):
                reason = f"character {place} is a control character or half of one"
                raise InvalidAction("type.text", self.text, reason, "Press keys by name instead")


@dataclass(frozen=True)
class PressKeys:
    """Press keys one after the other and release them in reverse: `("Control", "a")` is a chord."""

    kind: ClassVar[str] = "press"
    keys: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.keys) <= MAX_KEYS:
            raise InvalidAction("press.keys", self.keys, f"must be 1 to {MAX_KEYS} keys")
        for key in self.keys:
            if not isinstance(key, str) or not known_key(key):
                close = closest_names(key, NAMED, count=1) if isinstance(key, str) else []
                remedy = f"Did you mean {close[0]!r}?" if close else "Use a character, or a name such as Enter"
                raise InvalidAction("press.keys", key, "no key has this name", remedy)
        if len(set(self.keys)) != len(self.keys):
            raise InvalidAction("press.keys", self.keys, "a key can be held only once")


@dataclass(frozen=True)
class Scroll:
    """Turn the wheel: content moves so that `dy` more pixels below (or `dx` more to the right) come into view."""

    kind: ClassVar[str] = "scroll"
    at: Point | None
    dx: int
    dy: int

    def __post_init__(self) -> None:
        for name, number in (("dx", self.dx), ("dy", self.dy)):
            if not _is_int(number) or abs(number) > MAX_SCROLL:
                raise InvalidAction(f"scroll.{name}", number, f"must be a whole number up to {MAX_SCROLL} either way")
        if self.dx == self.dy == 0:
            raise InvalidAction("scroll", (self.dx, self.dy), "scrolls by nothing", "Use wait to let time pass")


@dataclass(frozen=True)
class Wait:
    """Let the page go on by itself."""

    kind: ClassVar[str] = "wait"
    seconds: float

    def __post_init__(self) -> None:
        number = self.seconds
        fine = isinstance(number, int | float) and not isinstance(number, bool)
        # Compared before anything is computed: a whole number may be too large for a float.
        if not fine or number != number or not 0 < number <= MAX_WAIT_S:
            raise InvalidAction("wait.seconds", number, f"must lie above 0 and up to {MAX_WAIT_S:g}")


@dataclass(frozen=True)
class Terminate:
    """The agent declares the task done, or given up."""

    kind: ClassVar[str] = "terminate"
    success: bool

    def __post_init__(self) -> None:
        if not isinstance(self.success, bool):
            raise InvalidAction("terminate.success", self.success, "must be true or false")


@dataclass(frozen=True)
class Answer:
    """The agent answers a question in words."""

    kind: ClassVar[str] = "answer"
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or len(self.text) > MAX_TEXT:
            raise InvalidAction("answer.text", self.text, f"must be a text of up to {MAX_TEXT} characters")
        if any(map(_is_half, self.text)):
            raise InvalidAction("answer.text", self.text, "holds half a character, which nobody could write down")


UiAction: TypeAlias = Click | Move | Drag | TypeText | PressKeys | Scroll | Wait | Terminate | Answer
KINDS: dict[str, type[Any]] = {cls.kind: cls for cls in get_args(UiAction)}


def encode(action: UiAction) -> dict[str, Any]:
    """The action as plain JSON."""
    document: dict[str, Any] = {"kind": action.kind}
    for field in dataclasses.fields(action):
        value = getattr(action, field.name)
        if isinstance(value, Point):
            value = list(value)
        elif isinstance(value, tuple):
            value = [list(item) if isinstance(item, Point) else item for item in value]
        document[field.name] = value
    return document


def decode(document: Any) -> UiAction:
    """The action a JSON document describes; `InvalidAction` names what is wrong with it."""
    if not isinstance(document, Mapping):
        raise InvalidAction("action", document, "is not a mapping", 'Write {"kind": "click", "at": [10, 20]}')
    kind = document.get("kind")
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise InvalidAction("action.kind", kind, f"is none of {', '.join(KINDS)}")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    given = {str(key): value for key, value in document.items() if key != "kind"}
    for key in given:
        if key not in fields:
            close = closest_names(key, fields, count=1)
            remedy = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(fields) or 'none'}"
            raise InvalidAction(f"{kind}.{key}", given[key], "unknown key", remedy)
    for name, field in fields.items():
        if name not in given:
            # A place that is left out is where the pointer is.
            if name == "at" and cls in (Click, Scroll):
                given[name] = None
            elif name in ("dx", "dy"):
                given[name] = 0
            elif field.default is dataclasses.MISSING:
                raise InvalidAction(f"{kind}.{name}", None, "required and not given")
    action: UiAction = cls(**{name: _decoded(f"{kind}.{name}", name, value) for name, value in given.items()})
    return action


def _decoded(place: str, name: str, value: Any) -> Any:
    if name == "at":
        # Only a click and a scroll know what to do without a place.
        return None if value is None and not place.startswith("move") else _point(place, value)
    if name == "path":
        return tuple(_point(place, point) for point in _list(place, value))
    if name in ("keys", "held"):
        return tuple(_list(place, value))
    return value


def _list(place: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise InvalidAction(place, value, "is not a list")
    return list(value)


def _point(place: str, value: Any) -> Point:
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(_is_int(number) for number in value):
        raise InvalidAction(place, value, "is not a point [x, y] in whole pixels")
    return Point(int(value[0]), int(value[1]))


def fits(action: UiAction, width: int, height: int) -> None:
    """Refuse an action that points outside a screen of this size."""
    points: tuple[Point, ...] = ()
    if isinstance(action, Click | Move | Scroll) and action.at is not None:
        points = (action.at,)
    elif isinstance(action, Drag):
        points = action.path
    for point in points:
        if not (0 <= point.x < width and 0 <= point.y < height):
            raise InvalidAction(
                f"{action.kind}.{'path' if isinstance(action, Drag) else 'at'}", list(point),
                f"lies outside the screen of {width} x {height} pixels",
                f"x runs from 0 to {width - 1}, y from 0 to {height - 1}",
            )  # fmt: skip


def _check_button(button: str) -> None:
    if button not in get_args(Button):
        raise InvalidAction("button", button, f"is none of {', '.join(get_args(Button))}")


def _is_half(character: str) -> bool:
    """Whether it is one of a pair of surrogates, which JSON can say and UTF-8 cannot."""
    return 0xD800 <= ord(character) <= 0xDFFF


def _is_int(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)
