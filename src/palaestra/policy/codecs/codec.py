"""`ActionCodec`: one model family's way of saying actions, and what becomes of an answer that is read.

A codec is a pure function of text and frame. Writing refuses what the family has no exact word for; reading refuses
what it does not understand, with a code to count by and a reason to show. Neither ever guesses, and reading never
raises: an unreadable answer is a recorded step of an episode, not an accident.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from palaestra.policy.codecs.frame import Frame
from palaestra.sessions.action import UiAction

__all__ = ["ActionCodec", "Decoded", "Understood", "Unreadable"]


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


class ActionCodec(Protocol):
    """How one family of models says what it does."""

    @property
    def name(self) -> str:
        """The name it is chosen by."""

    def system_prompt(self, frame: Frame) -> str:
        """The text that teaches a model the grammar."""

    def encode(self, action: UiAction, frame: Frame) -> str:
        """The action in the family's words; `NotExpressible` when there are none."""

    def decode(self, text: str, frame: Frame) -> Decoded:
        """What an answer says. Never raises."""
