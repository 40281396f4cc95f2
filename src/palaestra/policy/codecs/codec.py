"""`ActionCodec`: one model family's way of saying actions, and what becomes of an answer that is read.

A codec is a pure function of text and frame. Writing refuses what the family has no exact word for; reading refuses
what it does not understand, with a code to count by and a reason to show. Neither ever guesses, and reading never
raises: an unreadable answer is a recorded step of an episode, not an accident.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from palaestra.errors import InvalidAction, UnsupportedAction
from palaestra.policy.codecs.coordinates import Frame
from palaestra.policy.codecs.decoding import Decoded
from palaestra.policy.codecs.key_names import KeyNames
from palaestra.sessions.action import Answer, Point, Scroll, TypeText, UiAction, fits

__all__ = ["DIRECTIONS", "WHEEL_PIXELS", "ActionCodec", "check_writable", "clicks", "no_words", "spelled", "turned"]


class ActionCodec(Protocol):
    """How one family of models says what it does."""

    @property
    def name(self) -> str:
        """The name it is chosen by."""

    def system_prompt(self, frame: Frame) -> str:
        """The text that teaches a model the grammar."""

    def encode(self, action: UiAction, frame: Frame) -> str:
        """The action in the family's words; `UnsupportedAction` when there are none."""

    def decode(self, text: str, frame: Frame) -> Decoded:
        """What an answer says. Never raises."""


def no_words(codec: str, action: UiAction, reason: str, remedy: str = "") -> UnsupportedAction:
    """The refusal of an action that a family cannot say exactly."""
    return UnsupportedAction(f"{codec}.{action.kind}", action, reason, remedy)


def check_writable(codec: str, action: UiAction, frame: Frame) -> None:
    """Refuse what no family can say: a point that is not on the screen, a text that is not Unicode."""
    try:
        fits(action, frame.screen.width, frame.screen.height)
    except InvalidAction as error:
        raise UnsupportedAction(f"{codec}.{action.kind}", action, error.reason, error.remedy) from None
    if isinstance(action, TypeText | Answer) and any(0xD800 <= ord(character) <= 0xDFFF for character in action.text):
        raise no_words(codec, action, "the text contains half a character")


def spelled(codec: str, action: UiAction, keys: tuple[str, ...], names: KeyNames) -> list[str]:
    """The family's names of keys."""
    spellings: list[str] = []
    for key in keys:
        spelling = names.spelling(key)
        if spelling is None:
            raise no_words(codec, action, f"has no name for the key {key!r}", "Press Shift and the small letter")
        if spelling in spellings:
            raise no_words(codec, action, f"{spelling!r} would be held twice")
        spellings.append(spelling)
    return spellings


WHEEL_PIXELS = 100
"""What one click of a wheel scrolls by. Browsers do about this on common systems; no family says it."""

DIRECTIONS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
)
"""Which way more of the page comes into view."""


def clicks(scroll: Scroll) -> tuple[str, int] | None:
    """The direction and number of clicks that scroll exactly this far; None when no number does."""
    for direction, (dx, dy) in DIRECTIONS.items():
        along = scroll.dx * dx + scroll.dy * dy
        if along > 0 and (scroll.dx, scroll.dy) == (along * dx, along * dy) and along % WHEEL_PIXELS == 0:
            return direction, along // WHEEL_PIXELS
    return None


def turned(at: Point | None, direction: str, number: int) -> Scroll:
    """The scroll that `number` clicks in a direction make."""
    dx, dy = DIRECTIONS[direction]
    return Scroll(at, dx * number * WHEEL_PIXELS, dy * number * WHEEL_PIXELS)
