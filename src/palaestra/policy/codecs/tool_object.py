"""Base class of the computer tools of Anthropic and OpenAI: one JSON object per action, in pixels of the image.

A subclass names the key that holds the action, the arguments of each action, the conversion in both directions, and how
its API wraps the object: a reply may also be the whole message, or its list of blocks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from palaestra.policy.codecs.codec import ActionCodec
from palaestra.policy.codecs.coordinates import CoordinateFrame, ImagePixels
from palaestra.policy.codecs.decoding import (
    SEVERAL,
    Arguments,
    ArgumentSpec,
    DecodedAction,
    DecodeError,
    abbreviate,
    dump_json,
    parse_single_json,
)
from palaestra.sessions.action import UiAction


class ToolObjectCodec(ActionCodec):
    """A codec that writes each action as one JSON object."""

    space = ImagePixels()
    prompt: ClassVar[str]
    """The tool's description, with placeholders for the image's `width` and `height`."""
    word: ClassVar[str]
    """The key that holds the action's name."""
    unnamed: ClassVar[str]
    """Error message for an object without that key."""
    specs: ClassVar[Mapping[str, ArgumentSpec]]
    unsupported: ClassVar[Mapping[str, str]]
    """Actions of the tool that a session does not support, with the reason."""

    def system_prompt(self, frame: CoordinateFrame) -> str:
        """The tool's description, for models that are not sent a tool definition."""
        return self.prompt.format(width=frame.image.width, height=frame.image.height)

    def _write(self, action: UiAction, frame: CoordinateFrame) -> str:
        return dump_json(self._object(action, frame))

    def _read(self, text: str, frame: CoordinateFrame) -> DecodedAction:
        value, span = parse_single_json(text)
        document, thought = self._single_action(value)
        if self.word not in document:
            raise DecodeError("missing_argument", self.unnamed)
        rest = {name: value for name, value in document.items() if name != self.word}
        given = Arguments.of(document[self.word], rest, self.specs, self.unsupported)
        return DecodedAction(self._action(given, frame), thought, span)

    def _single_action(self, value: Any) -> tuple[dict[str, Any], str]:
        """The one action object in a reply, and the text around it."""
        blocks = self._blocks(value)
        actions: list[Any] = [value] if blocks is None else []
        texts: list[str] = []
        for block in blocks or ():
            if not isinstance(block, dict):
                raise DecodeError("syntax", f"the list holds {abbreviate(block)}, not a JSON object")
            block_actions, block_texts = self._read_block(block)
            actions += block_actions
            texts += block_texts
        if not actions:
            raise DecodeError("no_action", "the message calls no tool")
        if len(actions) > 1:
            raise DecodeError("several", SEVERAL)
        (action,) = actions
        if not isinstance(action, dict):
            raise DecodeError("syntax", f"the action is {abbreviate(action)}, not a JSON object")
        return action, "\n".join(text for text in texts if text)

    @abstractmethod
    def _blocks(self, value: Any) -> list[Any] | None:
        """The blocks of a message or list; None if the value is an action object."""

    @abstractmethod
    def _read_block(self, block: Mapping[str, Any]) -> tuple[list[Any], list[str]]:
        """The actions and the texts of one block; `DecodeError` for other kinds of block."""

    @abstractmethod
    def _object(self, action: UiAction, frame: CoordinateFrame) -> dict[str, Any]:
        """The action as an object; `UnsupportedAction` if the tool cannot express it."""

    @abstractmethod
    def _action(self, given: Arguments, frame: CoordinateFrame) -> UiAction:
        """The action with these arguments."""


def block_texts(value: Any, key: str = "text") -> list[str]:
    """The texts of a list of blocks, or of a plain string in place of the list."""
    if isinstance(value, str):
        return [value]
    blocks = value if isinstance(value, list) else []
    return [block[key] for block in blocks if isinstance(block, dict) and isinstance(block.get(key), str)]
