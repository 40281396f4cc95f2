"""A computer tool whose calls are one JSON object each, in pixels of the picture: what Anthropic's and OpenAI's share.

A family says which key names the action, which arguments each has, and how they become an action and back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from palaestra.policy.codecs.codec import Decoded, Understood
from palaestra.policy.codecs.frame import Frame
from palaestra.policy.codecs.json_text import sole_object, written
from palaestra.policy.codecs.reading import Arguments, Refusal, Shape, read_answer
from palaestra.policy.codecs.space import ImagePixels
from palaestra.policy.codecs.writing import check_writable
from palaestra.sessions.action import UiAction

__all__ = ["ToolObjectCodec"]


class ToolObjectCodec(ABC):
    """One JSON object is one action."""

    name: str
    space = ImagePixels()
    prompt: ClassVar[str]
    """The tool's description, with places for the picture's `width` and `height`."""
    word: ClassVar[str]
    """The key that names the action."""
    unnamed: ClassVar[str]
    """What is said of an object without it."""
    shapes: ClassVar[Mapping[str, Shape]]
    unsupported: ClassVar[Mapping[str, str]]
    """Words the tool has and a session does not, with the reason."""

    def system_prompt(self, frame: Frame) -> str:
        """What the tool's own description says, for models that are not sent one."""
        return self.prompt.format(width=frame.image.width, height=frame.image.height)

    def encode(self, action: UiAction, frame: Frame) -> str:
        """The object as JSON."""
        check_writable(self.name, action, frame)
        return written(self._object(action, frame))

    def decode(self, text: str, frame: Frame) -> Decoded:
        """What an object says."""
        return read_answer(text, lambda: self._read(text, frame))

    def _read(self, text: str, frame: Frame) -> Understood:
        document, span = sole_object(text)
        if self.word not in document:
            raise Refusal("missing_argument", self.unnamed)
        rest = {name: value for name, value in document.items() if name != self.word}
        given = Arguments.of(document[self.word], rest, self.shapes, self.unsupported)
        return Understood(self._action(given, frame), "", span)

    @abstractmethod
    def _object(self, action: UiAction, frame: Frame) -> dict[str, Any]:
        """The action as an object; `NotExpressible` when the tool has no words for it."""

    @abstractmethod
    def _action(self, given: Arguments, frame: Frame) -> UiAction:
        """The action that a word with its arguments means."""
