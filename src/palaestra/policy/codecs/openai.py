"""OpenAI's computer tool: one action object as JSON, in pixels of the image that was sent.

For interchange with recorded conversations. A reply is the JSON text of one `action`, of a `computer_call`, of a list
of output items or of a whole response. A task ends with the model's turn and not with an action, so `Terminate` and
`Answer` cannot be expressed. A positive `scroll_y` scrolls down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from palaestra.policy.codecs.coordinates import CoordinateFrame
from palaestra.policy.codecs.decoding import Arguments, ArgumentSpec, DecodeError, abbreviate
from palaestra.policy.codecs.key_names import OPENAI_KEYS
from palaestra.policy.codecs.tool_object import ToolObjectCodec, block_texts
from palaestra.sessions.action import Button, Click, Drag, Move, Point, PressKeys, Scroll, TypeText, UiAction, Wait

WAIT_S = 2
"""Seconds of a `wait`, which has no duration: what the API's own examples use."""

_BUTTONS: Mapping[str, Button] = {"left": "left", "right": "right", "wheel": "middle"}
_XY = ArgumentSpec(("x", "y"))
_SPECS: Mapping[str, ArgumentSpec] = {
    "click": ArgumentSpec(("button", "x", "y"), ("keys",)),
    "double_click": ArgumentSpec(("x", "y"), ("keys",)),
    "drag": ArgumentSpec(("path",), ("keys",)),
    "keypress": ArgumentSpec(("keys",)),
    "move": ArgumentSpec(("x", "y"), ("keys",)),
    "scroll": ArgumentSpec(("x", "y", "scroll_x", "scroll_y"), ("keys",)),
    "type": ArgumentSpec(("text",)),
    "wait": ArgumentSpec(),
}
_UNSUPPORTED: Mapping[str, str] = {"screenshot": "there is nothing to do; a screenshot follows every action"}
_PROMPT = """\
Use a mouse and keyboard to interact with a computer. The screenshots you see are {width}x{height} pixels; x and y \
count their pixels from the left and the top edge.
Answer with one JSON object. One of:
{{"type": "click", "button": "left", "x": 0, "y": 0}} (also right and wheel; "keys": ["CTRL"] holds keys meanwhile)
{{"type": "double_click", "x": 0, "y": 0}}
{{"type": "move", "x": 0, "y": 0}}
{{"type": "drag", "path": [{{"x": 0, "y": 0}}, {{"x": 0, "y": 0}}]}}
{{"type": "scroll", "x": 0, "y": 0, "scroll_x": 0, "scroll_y": 100}} (pixels; positive is right and down)
{{"type": "type", "text": "..."}}
{{"type": "keypress", "keys": ["CTRL", "A"]}} (names such as ENTER, TAB, ESC, BACKSPACE, ARROWLEFT)
{{"type": "wait"}}"""


@dataclass(frozen=True)
class OpenAICodec(ToolObjectCodec):
    """OpenAI's computer tool."""

    name: str = "openai"
    prompt = _PROMPT
    word = "type"
    unnamed = "the object names no type"
    specs = _SPECS
    unsupported = _UNSUPPORTED

    def _object(self, action: UiAction, frame: CoordinateFrame) -> dict[str, Any]:
        match action:
            case Click():
                return self._click(action, frame)
            case Move(at):
                return {"type": "move"} | self._xy(at, frame)
            case Drag(path):
                if action.button != "left":
                    raise self._error(action, "can only drag with the left button")
                return {"type": "drag", "path": [self._xy(point, frame) for point in path]}
            case Scroll(at, dx, dy):
                if at is None:
                    raise self._error(action, "can only scroll at a point", "Give the position of the pointer")
                return {"type": "scroll"} | self._xy(at, frame) | {"scroll_x": dx, "scroll_y": dy}
            case TypeText(text):
                return {"type": "type", "text": text}
            case PressKeys(keys):
                return {"type": "keypress", "keys": self._spell(action, keys, OPENAI_KEYS)}
            case Wait(seconds):
                if seconds != WAIT_S:
                    raise self._error(action, f"can only wait {WAIT_S} seconds")
                return {"type": "wait"}
            case _:
                raise self._error(action, "has no action for it: the model ends its turn without a tool call")

    def _blocks(self, value: Any) -> list[Any] | None:
        if isinstance(value, list):
            return value
        if not isinstance(value, dict):
            return None
        if value.get("type") == "computer_call":
            return [value]
        output = value.get("output")
        return output if isinstance(output, list) else None

    def _read_block(self, block: Mapping[str, Any]) -> tuple[list[Any], list[str]]:
        match block.get("type"):
            case "computer_call":
                return _actions_of(block), []
            case "message":
                return [], block_texts(block.get("content"))
            case "reasoning":
                return [], [*block_texts(block.get("summary")), *block_texts(block.get("content"))]
            case word if word in _SPECS or word in _UNSUPPORTED:
                return [dict(block)], []
            case other:
                raise DecodeError("unsupported", f"an output item of type {abbreviate(other)} is not read")

    def _click(self, action: Click, frame: CoordinateFrame) -> dict[str, Any]:
        if action.at is None:
            raise self._error(action, "can only click at a point", "Give the position of the pointer")
        held = {"keys": self._spell(action, action.held, OPENAI_KEYS)} if action.held else {}
        place = self._xy(action.at, frame)
        if action.times == 1:
            (button,) = (word for word, button in _BUTTONS.items() if button == action.button)
            return {"type": "click", "button": button} | place | held
        return {"type": self._click_word(action, {"double_click": ("left", 2)})} | place | held

    def _xy(self, point: Point, frame: CoordinateFrame) -> dict[str, int]:
        x, y = self.space.write(point, frame)
        return {"x": x, "y": y}

    def _action(self, given: Arguments, frame: CoordinateFrame) -> UiAction:
        keys = tuple(OPENAI_KEYS.key(key) for key in given.words("keys")) if "keys" in given else ()
        if keys and given.word in ("drag", "move", "scroll"):
            raise DecodeError("unsupported", f"{given.word}.keys: keys can only be held during a click")
        match given.word:
            case "click":
                button = given.choice("button", (*_BUTTONS, "back", "forward"))
                if button not in _BUTTONS:
                    raise DecodeError("unsupported", f"click.button: a session has no {button} button")
                return Click(self._point(given, frame), _BUTTONS[button], 1, keys)
            case "double_click":
                return Click(self._point(given, frame), "left", 2, keys)
            case "move":
                return Move(self._point(given, frame))
            case "drag":
                return Drag(tuple(self._point(point, frame) for point in given.objects("path", _XY)))
            case "scroll":
                return Scroll(self._point(given, frame), given.whole("scroll_x"), given.whole("scroll_y"))
            case "type":
                return TypeText(given.text("text"))
            case "keypress":
                return PressKeys(keys)
            case _:
                return Wait(WAIT_S)

    def _point(self, given: Arguments, frame: CoordinateFrame) -> Point:
        return self.space.read(given.whole("x"), given.whole("y"), frame)


def _actions_of(call: Mapping[str, Any]) -> list[Any]:
    """The actions of a `computer_call`, which holds one or a list of them."""
    if call.get("pending_safety_checks"):
        raise DecodeError("unsupported", "computer_call.pending_safety_checks: they cannot be confirmed here")
    if call.get("status") not in (None, "completed"):
        raise DecodeError("unclosed", f"the call's status is {abbreviate(call['status'])}")
    action, actions = call.get("action"), call.get("actions")
    if action is not None and actions:
        raise DecodeError("several", "the call has both an action and a list of actions")
    if action is not None:
        return [action]
    if not isinstance(actions, list):
        raise DecodeError("missing_argument", "the computer_call has no action")
    return actions
