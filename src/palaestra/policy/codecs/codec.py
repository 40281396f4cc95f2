"""`ActionCodec`: how one family of models writes UI actions as text, and what the families share.

A codec is a pure function of text and coordinate frame. Encoding raises `UnsupportedAction` for an action that the
family cannot express exactly. Decoding never raises and never guesses: a reply that cannot be decoded is recorded as a
step of the episode, with a code to count by and a reason to show.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType

from palaestra.errors import InvalidAction, UnsupportedAction
from palaestra.policy.codecs.coordinates import CoordinateFrame
from palaestra.policy.codecs.decoding import DecodedAction, DecodeError, DecodeResult, UnreadableReply
from palaestra.policy.codecs.key_names import KeyNames
from palaestra.sessions.action import Answer, Button, Click, Drag, Point, Scroll, TypeText, UiAction, fits

MAX_REPLY_CHARS = 200_000
"""The longest text an action may type fits even when every character is escaped."""

WHEEL_PIXELS = 100
"""Pixels per click of the scroll wheel. No family documents a value; browsers scroll by about this much."""

DIRECTIONS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
)
"""Sign of `dx` and `dy` for each scroll direction."""

CLICK_ACTIONS: Mapping[str, tuple[Button, int]] = MappingProxyType(
    {
        "left_click": ("left", 1),
        "right_click": ("right", 1),
        "middle_click": ("middle", 1),
        "double_click": ("left", 2),
        "triple_click": ("left", 3),
    }
)
"""Button and number of clicks of the click actions that Qwen and Anthropic share."""


class ActionCodec(ABC):
    """Encodes and decodes the actions of one family of models."""

    name: str
    """Name in the configuration (`actor.codec`)."""

    @abstractmethod
    def system_prompt(self, frame: CoordinateFrame) -> str:
        """The system prompt that explains the action grammar to a model."""

    def encode(self, action: UiAction, frame: CoordinateFrame) -> str:
        """The action as the family writes it; `UnsupportedAction` if it has no exact form."""
        try:
            fits(action, frame.screen.width, frame.screen.height)
        except InvalidAction as error:
            raise self._error(action, error.reason, error.remedy) from None
        if isinstance(action, TypeText | Answer) and any(0xD800 <= ord(letter) <= 0xDFFF for letter in action.text):
            raise self._error(action, "the text contains half of a surrogate pair")
        return self._write(action, frame)

    def decode(self, text: str, frame: CoordinateFrame) -> DecodeResult:
        """The action in a reply, or why there is none. Never raises."""
        if len(text) > MAX_REPLY_CHARS:
            reason = f"the reply has {len(text)} characters; at most {MAX_REPLY_CHARS} are read"
            return UnreadableReply("too_long", reason)
        try:
            return self._read(text, frame)
        except DecodeError as error:
            return UnreadableReply(error.code, error.reason)
        except InvalidAction as error:
            return UnreadableReply("invalid", str(error))
        except RecursionError:
            return UnreadableReply("syntax", "it is nested too deeply")

    @abstractmethod
    def _write(self, action: UiAction, frame: CoordinateFrame) -> str:
        """The text of an action that lies on the screen; `UnsupportedAction` if it has no exact form."""

    @abstractmethod
    def _read(self, text: str, frame: CoordinateFrame) -> DecodedAction:
        """The only action in a reply; `DecodeError` or `InvalidAction` if there is none."""

    def _error(self, action: UiAction, reason: str, remedy: str = "") -> UnsupportedAction:
        """The error for an action that the family cannot express exactly."""
        return UnsupportedAction(f"{self.name}.{action.kind}", action, reason, remedy)

    def _check_straight(self, action: Drag) -> None:
        """Reject drags other than with the left button from one point straight to another."""
        if len(action.path) != 2 or action.button != "left":
            raise self._error(action, "can only drag with the left button and straight to one point")

    def _click_word(self, action: Click, words: Mapping[str, tuple[Button, int]]) -> str:
        """The family's word for this button and number of clicks."""
        for word, click in words.items():
            if click == (action.button, action.times):
                return word
        raise self._error(action, f"has no action for {action.times} clicks of the {action.button} button")

    def _spell(self, action: UiAction, keys: tuple[str, ...], names: KeyNames) -> list[str]:
        """The family's names of the keys."""
        spellings: list[str] = []
        for key in keys:
            spelling = names.spelling(key)
            if spelling is None:
                remedy = "Press Shift and the small letter"
                raise self._error(action, f"has no name for the key {key!r}", remedy)
            if spelling in spellings:
                raise self._error(action, f"{spelling!r} would be held twice")
            spellings.append(spelling)
        return spellings


def wheel_clicks(scroll: Scroll) -> tuple[str, int] | None:
    """Direction and number of wheel clicks that scroll exactly this far; None if no number does."""
    for direction, (dx, dy) in DIRECTIONS.items():
        distance = scroll.dx * dx + scroll.dy * dy
        if distance > 0 and (scroll.dx, scroll.dy) == (distance * dx, distance * dy) and distance % WHEEL_PIXELS == 0:
            return direction, distance // WHEEL_PIXELS
    return None


def scroll_by_clicks(at: Point | None, direction: str, count: int) -> Scroll:
    """The scroll action of `count` wheel clicks in a direction."""
    dx, dy = DIRECTIONS[direction]
    return Scroll(at, dx * count * WHEEL_PIXELS, dy * count * WHEEL_PIXELS)
