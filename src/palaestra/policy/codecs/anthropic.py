"""Anthropic's computer tool: the tool's input as one JSON object, in pixels of the image that was sent.

For interchange with recorded conversations. A reply is the JSON text of a tool input, of a `tool_use` block, of a list
of blocks or of a whole message. A task ends with the model's turn and not with an action, so `Terminate` and `Answer`
cannot be expressed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from palaestra.policy.codecs.codec import CLICK_ACTIONS, DIRECTIONS, WHEEL_PIXELS, scroll_by_clicks, wheel_clicks
from palaestra.policy.codecs.coordinates import CoordinateFrame
from palaestra.policy.codecs.decoding import Arguments, ArgumentSpec, DecodeError, abbreviate
from palaestra.policy.codecs.key_names import XDOTOOL_KEYS
from palaestra.policy.codecs.tool_object import ToolObjectCodec, block_texts
from palaestra.sessions.action import Click, Drag, Move, Point, PressKeys, Scroll, TypeText, UiAction, Wait

_SPECS: Mapping[str, ArgumentSpec] = {
    "key": ArgumentSpec(("text",), ("repeat",)),
    "type": ArgumentSpec(("text",)),
    "mouse_move": ArgumentSpec(("coordinate",)),
    **{word: ArgumentSpec((), ("coordinate", "text")) for word in CLICK_ACTIONS},
    "left_click_drag": ArgumentSpec(("start_coordinate", "coordinate"), ("text",)),
    "scroll": ArgumentSpec(("scroll_direction", "scroll_amount"), ("coordinate", "text")),
    "wait": ArgumentSpec(("duration",)),
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
    """Anthropic's computer tool."""

    name: str = "anthropic"
    prompt = _PROMPT
    word = "action"
    unnamed = "the input names no action"
    specs = _SPECS
    unsupported = _UNSUPPORTED

    def _object(self, action: UiAction, frame: CoordinateFrame) -> dict[str, Any]:
        match action:
            case Click():
                click = {"action": self._click_word(action, CLICK_ACTIONS)} | self._coordinate(action.at, frame)
                if action.held:
                    click["text"] = "+".join(self._spell(action, action.held, XDOTOOL_KEYS))
                return click
            case Move(at):
                return {"action": "mouse_move"} | self._coordinate(at, frame)
            case Drag():
                self._check_straight(action)
                start, end = (list(self.space.write(point, frame)) for point in action.path)
                return {"action": "left_click_drag", "start_coordinate": start, "coordinate": end}
            case Scroll():
                clicks = wheel_clicks(action)
                if clicks is None:
                    reason = f"scrolls along one axis, by whole clicks of {WHEEL_PIXELS} pixels"
                    raise self._error(action, reason)
                scroll = {"action": "scroll", "scroll_direction": clicks[0], "scroll_amount": clicks[1]}
                return scroll | self._coordinate(action.at, frame)
            case TypeText(text):
                return {"action": "type", "text": text}
            case PressKeys(keys):
                return {"action": "key", "text": "+".join(self._spell(action, keys, XDOTOOL_KEYS))}
            case Wait(seconds):
                if seconds != int(seconds):
                    raise self._error(action, "can only wait whole seconds")
                return {"action": "wait", "duration": int(seconds)}
            case _:
                raise self._error(action, "has no action for it: the model ends its turn without a tool call")

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
                return [], block_texts([block])
            case "thinking":
                return [], block_texts([block], "thinking")
            case "redacted_thinking":
                return [], []
            case "tool_use":
                if block.get("name") != "computer":
                    raise DecodeError(
                        "unknown_action", f"{abbreviate(block.get('name'))} is not a tool. The only one is 'computer'"
                    )
                return [block.get("input")], []
            case None if "action" in block:
                return [dict(block)], []
            case other:
                raise DecodeError("unsupported", f"a block of type {abbreviate(other)} is not read")

    def _coordinate(self, at: Point | None, frame: CoordinateFrame) -> dict[str, Any]:
        return {} if at is None else {"coordinate": list(self.space.write(at, frame))}

    def _action(self, given: Arguments, frame: CoordinateFrame) -> UiAction:
        if given.word in CLICK_ACTIONS:
            button, times = CLICK_ACTIONS[given.word]
            return Click(self._point(given, frame), button, times, _keys(given) if "text" in given else ())
        match given.word:
            case "mouse_move":
                return Move(self._read_point(given, "coordinate", frame))
            case "left_click_drag":
                _reject_held_keys(given)
                ends = (self._read_point(given, name, frame) for name in ("start_coordinate", "coordinate"))
                return Drag(tuple(ends))
            case "scroll":
                _reject_held_keys(given)
                amount, direction = given.whole("scroll_amount"), given.choice("scroll_direction", DIRECTIONS)
                if amount < 0:
                    raise DecodeError("bad_argument", "scroll.scroll_amount is negative; use scroll_direction instead")
                return scroll_by_clicks(self._point(given, frame), direction, amount)
            case "key":
                if "repeat" in given and given.whole("repeat") != 1:
                    raise DecodeError("unsupported", "key.repeat: an action presses keys once")
                return PressKeys(_keys(given))
            case "type":
                return TypeText(given.text("text"))
            case _:
                return Wait(given.number("duration"))

    def _point(self, given: Arguments, frame: CoordinateFrame) -> Point | None:
        return self._read_point(given, "coordinate", frame) if "coordinate" in given else None

    def _read_point(self, given: Arguments, name: str, frame: CoordinateFrame) -> Point:
        return self.space.read(*given.pair(name, whole=True), frame)


def _keys(given: Arguments) -> tuple[str, ...]:
    return tuple(XDOTOOL_KEYS.key(key) for key in given.text("text").split("+"))


def _reject_held_keys(given: Arguments) -> None:
    if "text" in given:
        raise DecodeError("unsupported", f"{given.word}.text: keys can only be held during a click")
