"""`UiAction`: everything an agent can do on a screen, as a union of dataclasses in screen pixels.

Every class validates its fields, and `fits` checks that an action lies on a screen. Actions are plain JSON on the wire
(`encode`, `decode`); decoding refuses unknown keys and values. Codecs translate the grammars of models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

from palaestra.config import closest_names, suggest_name
from palaestra.errors import InvalidAction
from palaestra.sessions.keys import MODIFIERS, NAMED, is_known_key

Button: TypeAlias = Literal["left", "middle", "right"]
MAX_TEXT, MAX_KEYS, MAX_PATH, MAX_WAIT_S, MAX_SCROLL = 10_000, 8, 256, 60.0, 100_000


class Point(NamedTuple):
    """A pixel of the screen, from its top left corner."""

    x: int
    y: int


@dataclass(frozen=True)
class Click:
    """Press and release a mouse button `times` times in quick succession, while the keys `held` are down."""

    kind: ClassVar[str] = "click"
    at: Point | None = None
    """None: at the pointer."""
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
    """Type Unicode characters into the focused element; a newline is the Enter key, a tab the Tab key."""

    kind: ClassVar[str] = "type"
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not 1 <= len(self.text) <= MAX_TEXT:
            raise InvalidAction("type.text", self.text, f"must be a text of 1 to {MAX_TEXT} characters")
        for index, character in enumerate(self.text):
            if (ord(character) < 32 and character not in "\n\t") or _is_surrogate(character):
                reason = f"character {index} is a control character or half of a surrogate pair"
                raise InvalidAction("type.text", self.text, reason, "Press keys by name instead")


@dataclass(frozen=True)
class PressKeys:
    """Press keys in order and release them in reverse: `("Control", "a")` is a chord."""

    kind: ClassVar[str] = "press"
    keys: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.keys) <= MAX_KEYS:
            raise InvalidAction("press.keys", self.keys, f"must be 1 to {MAX_KEYS} keys")
        for key in self.keys:
            if not isinstance(key, str) or not is_known_key(key):
                close = closest_names(key, NAMED, count=1) if isinstance(key, str) else []
                remedy = f"Did you mean {close[0]!r}?" if close else "Use a character, or a name such as Enter"
                raise InvalidAction("press.keys", key, "no key has this name", remedy)
        if len(set(self.keys)) != len(self.keys):
            raise InvalidAction("press.keys", self.keys, "a key can be held only once")


@dataclass(frozen=True)
class Scroll:
    """Turn the wheel, so that `dy` more pixels below (or `dx` more to the right) come into view."""

    kind: ClassVar[str] = "scroll"
    at: Point | None = None
    """None: at the pointer."""
    dx: int = 0
    dy: int = 0

    def __post_init__(self) -> None:
        for name, number in (("dx", self.dx), ("dy", self.dy)):
            if not _is_int(number) or abs(number) > MAX_SCROLL:
                raise InvalidAction(f"scroll.{name}", number, f"must be a whole number up to {MAX_SCROLL} either way")
        if self.dx == self.dy == 0:
            raise InvalidAction("scroll", (self.dx, self.dy), "does not scroll", "Use wait to let time pass")


@dataclass(frozen=True)
class Wait:
    """Let time pass without an action."""

    kind: ClassVar[str] = "wait"
    seconds: float

    def __post_init__(self) -> None:
        number = self.seconds
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        # Compared before any arithmetic: an integer may be too large for a float.
        if not is_number or number != number or not 0 < number <= MAX_WAIT_S:
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
    """The agent answers a question with a text."""

    kind: ClassVar[str] = "answer"
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or len(self.text) > MAX_TEXT:
            raise InvalidAction("answer.text", self.text, f"must be a text of up to {MAX_TEXT} characters")
        if any(map(_is_surrogate, self.text)):
            raise InvalidAction("answer.text", self.text, "holds half of a surrogate pair, which UTF-8 cannot encode")


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
    """The action from a JSON document; `InvalidAction` names the invalid field."""
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
            remedy = suggest_name(key, fields, f"Known: {', '.join(fields) or 'none'}")
            raise InvalidAction(f"{kind}.{key}", given[key], "unknown key", remedy)
    for name, field in fields.items():
        if name not in given and field.default is dataclasses.MISSING:
            raise InvalidAction(f"{kind}.{name}", None, "required and not given")
    action: UiAction = cls(**{name: _decode_field(f"{kind}.{name}", name, value) for name, value in given.items()})
    return action


def _decode_field(place: str, name: str, value: Any) -> Any:
    if name == "at":
        # Only a click and a scroll may have no position.
        return None if value is None and not place.startswith("move") else _decode_point(place, value)
    if name == "path":
        return tuple(_decode_point(place, point) for point in _decode_list(place, value))
    if name in ("keys", "held"):
        return tuple(_decode_list(place, value))
    return value


def _decode_list(place: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise InvalidAction(place, value, "is not a list")
    return list(value)


def _decode_point(place: str, value: Any) -> Point:
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
                f"{action.kind}.{'path' if isinstance(action, Drag) else 'at'}",
                list(point),
                f"lies outside the screen of {width} x {height} pixels",
                f"x runs from 0 to {width - 1}, y from 0 to {height - 1}",
            )


def _check_button(button: str) -> None:
    if button not in get_args(Button):
        raise InvalidAction("button", button, f"is none of {', '.join(get_args(Button))}")


def _is_surrogate(character: str) -> bool:
    """Whether it is half of a surrogate pair, which JSON can hold and UTF-8 cannot encode."""
    return 0xD800 <= ord(character) <= 0xDFFF


def _is_int(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)
