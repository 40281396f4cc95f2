"""A computer tool whose calls are one JSON object each, in pixels of the picture: what Anthropic's and OpenAI's share.

A family says which key names the action, which arguments each has, how they become an action and back, and how its
interface wraps the object: an answer may also be the whole message, or its list of blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from palaestra.policy.codecs.codec import check_writable
from palaestra.policy.codecs.coordinates import Frame, ImagePixels
from palaestra.policy.codecs.decoding import (
    Arguments,
    Decoded,
    Refusal,
    Shape,
    Understood,
    read_answer,
    shown,
    sole_value,
    written,
)
from palaestra.sessions.action import UiAction

__all__ = ["ToolObjectCodec", "texts_in"]


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
        value, span = sole_value(text)
        document, thought = self._sole_action(value)
        if self.word not in document:
            raise Refusal("missing_argument", self.unnamed)
        rest = {name: value for name, value in document.items() if name != self.word}
        given = Arguments.of(document[self.word], rest, self.shapes, self.unsupported)
        return Understood(self._action(given, frame), thought, span)

    def _sole_action(self, value: Any) -> tuple[dict[str, Any], str]:
        """The one action object in an answer, and the text around it."""
        blocks = self._blocks(value)
        actions: list[Any] = [value] if blocks is None else []
        texts: list[str] = []
        for block in blocks or ():
            if not isinstance(block, dict):
                raise Refusal("syntax", f"the list holds {shown(block)}, not a JSON object")
            block_actions, block_texts = self._read_block(block)
            actions += block_actions
            texts += block_texts
        if not actions:
            raise Refusal("no_action", "the message calls no tool")
        if len(actions) > 1:
            raise Refusal("several", "the answer says several actions; one is taken a step")
        (action,) = actions
        if not isinstance(action, dict):
            raise Refusal("syntax", f"the action is {shown(action)}, not a JSON object")
        return action, "\n".join(text for text in texts if text)

    @abstractmethod
    def _blocks(self, value: Any) -> list[Any] | None:
        """The blocks of a message, or of a list of them; None when the value is an action itself."""

    @abstractmethod
    def _read_block(self, block: Mapping[str, Any]) -> tuple[list[Any], list[str]]:
        """The actions and the texts of one block; `Refusal` for a block that is neither."""

    @abstractmethod
    def _object(self, action: UiAction, frame: Frame) -> dict[str, Any]:
        """The action as an object; `UnsupportedAction` when the tool has no words for it."""

    @abstractmethod
    def _action(self, given: Arguments, frame: Frame) -> UiAction:
        """The action that a word with its arguments means."""


def texts_in(value: Any, key: str = "text") -> list[str]:
    """The texts of a list of blocks, or a text that stands for such a list."""
    if isinstance(value, str):
        return [value]
    blocks = value if isinstance(value, list) else []
    return [block[key] for block in blocks if isinstance(block, dict) and isinstance(block.get(key), str)]
