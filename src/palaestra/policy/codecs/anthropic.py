"""Anthropic's computer tool: the tool's input as one JSON object, in pixels of the picture that was sent.

For interchange: recorded conversations become our actions and the other way round. An answer is the JSON text of a tool
input, of a `tool_use` block, of a list of blocks or of a whole message. The end of a task is the end of a turn there,
not an action, so neither a verdict nor an answer has a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from palaestra.policy.codecs.codec import DIRECTIONS, WHEEL_PIXELS, clicks, no_words, spelled, turned
from palaestra.policy.codecs.coordinates import Frame
from palaestra.policy.codecs.decoding import Arguments, Refusal, Shape, shown
from palaestra.policy.codecs.key_names import XDOTOOL_KEYS
from palaestra.policy.codecs.tool_object import ToolObjectCodec, texts_in
from palaestra.sessions.action import (
    Button,
    Click,
    Drag,
    Move,
    Point,
    PressKeys,
    Scroll,
    TypeText,
    UiAction,
    Wait,
)

__all__ = ["AnthropicCodec"]

_CLICKS: Mapping[str, tuple[Button, int]] = {
    "left_click": ("left", 1), "right_click": ("right", 1), "middle_click": ("middle", 1),
    "double_click": ("left", 2), "triple_click": ("left", 3),
}  # fmt: skip
_SHAPES: Mapping[str, Shape] = {
    "key": Shape(("text",), ("repeat",)),
    "type": Shape(("text",)),
    "mouse_move": Shape(("coordinate",)),
    **{word: Shape((), ("coordinate", "text")) for word in _CLICKS},
    "left_click_drag": Shape(("start_coordinate", "coordinate"), ("text",)),
    "scroll": Shape(("scroll_direction", "scroll_amount"), ("coordinate", "text")),
    "wait": Shape(("duration",)),
}
_UNSUPPORTED: Mapping[str, str] = {
    "hold_key": "a key cannot be held for a time here",
    "cursor_position": "there is nothing to do; the pointer is where it was last moved to",
    "left_mouse_down": "buttons are pressed and released in one action, left_click_drag",
    "left_mouse_up": "buttons are pressed and released in one action, left_click_drag",
    "screenshot": "there is nothing to do; a screenshot follows every action",
    "zoom": "there is nothing to do; screenshots show the whole screen",
}
_PROMPT = """\
Use a mouse and keyboard to interact with a computer. The screenshots you see are {width}x{height} pixels; coordinates \
[x, y] count their pixels from the left and the top edge.
Answer with one JSON object, the input of the tool `computer`. One of:
{{"action": "left_click", "coordinate": [x, y]}} (also right_click, middle_click, double_click, triple_click; without \
coordinate at the pointer; "text": "ctrl+shift" holds keys meanwhile)
{{"action": "mouse_move", "coordinate": [x, y]}}
{{"action": "left_click_drag", "start_coordinate": [x, y], "coordinate": [x, y]}}
{{"action": "scroll", "scroll_direction": "down", "scroll_amount": 3, "coordinate": [x, y]}} (also up, left, \
right; the amount is in clicks of the wheel)
{{"action": "type", "text": "..."}}
{{"action": "key", "text": "ctrl+s"}} (names such as Return, Tab, Escape, BackSpace, Page_Down, Left)
{{"action": "wait", "duration": 2}} (seconds)"""


@dataclass(frozen=True)
class AnthropicCodec(ToolObjectCodec):
    """The grammar of Anthropic's computer tool."""

    name: str = "anthropic"
    prompt = _PROMPT
    word = "action"
    unnamed = "the input names no action"
    shapes = _SHAPES
    unsupported = _UNSUPPORTED

    def _object(self, action: UiAction, frame: Frame) -> dict[str, Any]:
        match action:
            case Click():
                held = {"text": "+".join(spelled(self.name, action, action.held, XDOTOOL_KEYS))} if action.held else {}
                return {"action": self._click_word(action)} | self._coordinate(action.at, frame) | held
            case Move(at):
                return {"action": "mouse_move"} | self._coordinate(at, frame)
            case Drag():
                if len(action.path) != 2 or action.button != "left":
                    raise no_words(self.name, action, "drags with the left button and straight to one point")
                start, end = (list(self.space.write(point, frame)) for point in action.path)
                return {"action": "left_click_drag", "start_coordinate": start, "coordinate": end}
            case Scroll():
                turn = clicks(action)
                if turn is None:
                    reason = f"scrolls along one axis, by whole clicks of {WHEEL_PIXELS} pixels"
                    raise no_words(self.name, action, reason)
                words = {"action": "scroll", "scroll_direction": turn[0], "scroll_amount": turn[1]}
                return words | self._coordinate(action.at, frame)
            case TypeText(text):
                return {"action": "type", "text": text}
            case PressKeys(keys):
                return {"action": "key", "text": "+".join(spelled(self.name, action, keys, XDOTOOL_KEYS))}
            case Wait(seconds):
                if seconds != int(seconds):
                    raise no_words(self.name, action, "waits whole seconds")
                return {"action": "wait", "duration": int(seconds)}
            case _:
                raise no_words(self.name, action, "has no word for it: the turn ends without a call of the tool")

    def _blocks(self, value: Any) -> list[Any] | None:
        if isinstance(value, list):
            return value
        if not isinstance(value, dict):
            return None
        if value.get("type") == "tool_use":
            return [value]
        if value.get("type") == "message" or ("role" in value and "content" in value):
            content = value.get("content")
            return content if isinstance(content, list) else [{"type": "text", "text": content}]
        return None

    def _read_block(self, block: Mapping[str, Any]) -> tuple[list[Any], list[str]]:
        match block.get("type"):
            case "text":
                return [], texts_in([block])
            case "thinking":
                return [], texts_in([block], "thinking")
            case "redacted_thinking":
                return [], []
            case "tool_use":
                if block.get("name") != "computer":
                    raise Refusal("unknown_action", f"{shown(block.get('name'))} is no tool. There is only 'computer'")
                return [block.get("input")], []
            case None if "action" in block:
                return [dict(block)], []
            case other:
                raise Refusal("unsupported", f"a block of type {shown(other)} is not read")

    def _click_word(self, action: Click) -> str:
        for word, clicked in _CLICKS.items():
            if clicked == (action.button, action.times):
                return word
        raise no_words(self.name, action, f"has no word for {action.times} clicks of the {action.button} button")

    def _coordinate(self, at: Point | None, frame: Frame) -> dict[str, Any]:
        return {} if at is None else {"coordinate": list(self.space.write(at, frame))}

    def _action(self, given: Arguments, frame: Frame) -> UiAction:
        if given.word in _CLICKS:
            button, times = _CLICKS[given.word]
            return Click(self._point(given, frame), button, times, _keys(given) if "text" in given else ())
        match given.word:
            case "mouse_move":
                return Move(self._read_point(given, "coordinate", frame))
            case "left_click_drag":
                _no_keys(given)
                ends = (self._read_point(given, name, frame) for name in ("start_coordinate", "coordinate"))
                return Drag(tuple(ends))
            case "scroll":
                _no_keys(given)
                amount, direction = given.whole("scroll_amount"), given.choice("scroll_direction", DIRECTIONS)
                if amount < 0:
                    raise Refusal("bad_argument", "scroll.scroll_amount is negative; the direction says which way")
                return turned(self._point(given, frame), direction, amount)
            case "key":
                if "repeat" in given and given.whole("repeat") != 1:
                    raise Refusal("unsupported", "key.repeat: keys are pressed once an action")
                return PressKeys(_keys(given))
            case "type":
                return TypeText(given.text("text"))
            case _:
                return Wait(given.number("duration"))

    def _point(self, given: Arguments, frame: Frame) -> Point | None:
        return self._read_point(given, "coordinate", frame) if "coordinate" in given else None

    def _read_point(self, given: Arguments, name: str, frame: Frame) -> Point:
        return self.space.read(*given.pair(name, whole=True), frame)


def _keys(given: Arguments) -> tuple[str, ...]:
    return tuple(XDOTOOL_KEYS.key(key) for key in given.text("text").split("+"))


def _no_keys(given: Arguments) -> None:
    if "text" in given:
        raise Refusal("unsupported", f"{given.word}.text: keys can be held during a click only")
