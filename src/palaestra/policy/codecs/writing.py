"""What all codecs share while they write: how an action without words is refused."""

from __future__ import annotations

from palaestra.errors import InvalidAction, NotExpressible
from palaestra.policy.codecs.frame import Frame
from palaestra.policy.codecs.key_names import KeyNames
from palaestra.sessions.action import Answer, TypeText, UiAction, fits

__all__ = ["check_writable", "no_words", "spelled"]


def no_words(codec: str, action: UiAction, reason: str, remedy: str = "") -> NotExpressible:
    """The refusal of an action that a family cannot say exactly."""
    return NotExpressible(f"{codec}.{action.kind}", action, reason, remedy)


def check_writable(codec: str, action: UiAction, frame: Frame) -> None:
    """Refuse what no family can say: a point that is not on the screen, a text that is not Unicode."""
    try:
        fits(action, frame.screen.width, frame.screen.height)
    except InvalidAction as error:
        raise NotExpressible(f"{codec}.{action.kind}", action, error.reason, error.remedy) from None
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
